"""Checks that the servers of a pool serve the run's model, and compute the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_core.redact import redact
from miles_workers.servers.errors import ServerError
from miles_workers.servers.member import Member

#: Entries of ``config.json`` that determine the sizes of the weights.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "n_routed_experts", "num_local_experts",
)  # fmt: skip
#: Number of tokens that a server and another one score, and the mean difference of their log-probs at which they have different weights, as a
#: share of the standard deviation. Other kernels and batches cause about 1 % in BF16; other weights more than 100 %.
_PROBE, _DIFFERENT = 32, 0.2


@dataclass(frozen=True)
class SameModel:
    """What the servers of a run must serve. Their descriptions have ``architectures``, ``model_path``, and the entries of ``same``.

    Attributes:
        checkpoint: the run's checkpoint.
        config: the language model's keys of its ``config.json``.
        flag, program: the option that lists the servers, and the program that they run.
        same: entries of the description that must be the same on all servers.
        receives: updates replace all weights; otherwise the servers receive adapters of this checkpoint.
    """

    checkpoint: Path
    config: Mapping[str, Any]
    flag: str
    program: str
    same: tuple[str, ...]
    receives: bool = True

    def check(self, member: Member[Any], first: Member[Any]) -> None:
        """Raise ServerError unless a server has the run's model, and the same program and number formats as the first server."""
        url, info = redact(member.link.url), member.info
        ours, theirs = self.config.get("architectures"), info.get("architectures")
        if ours and theirs and ours != theirs:
            raise ServerError(
                f"{self.flag} {url}: the server serves {' '.join(theirs)}, and --hf-checkpoint {self.checkpoint} is {' '.join(ours)}; "
                "start it with this model"
            )
        for name, size in _read_sizes(info.get("model_path")).items():
            if name in self.config and size != self.config[name]:
                raise ServerError(
                    f"{self.flag} {url}: the server's model {info['model_path']} has {name} = {size}, and --hf-checkpoint "
                    f"{self.checkpoint} has {self.config[name]}; start it with this model"
                )
        for name in self.same:
            if info.get(name) != first.info.get(name):
                what = self.program if name == "version" else f"{name} ="
                raise ServerError(
                    f"{self.flag} {url}: the server has {what} {info.get(name)}, and {redact(first.link.url)} has {first.info.get(name)}; "
                    "all servers of a run must be alike"
                )

    def probe(self) -> list[int]:
        """Return some tokens for two servers to score: low ids, which are plain text."""
        return [token % int(self.config["vocab_size"]) for token in range(10, 10 + _PROBE)]

    def compare(self, new: tuple[Member[Any], NDArray[Any]], old: tuple[Member[Any], NDArray[Any]]) -> None:
        """Raise ServerError unless two servers with the same weights scored ``probe`` alike."""
        (member, found), (other, expected) = new, old
        error = float(np.abs(found - expected).mean())
        if not error <= _DIFFERENT * expected.std():
            raise ServerError(
                f"{self.flag} {redact(member.link.url)}: its log-probs differ from those of {redact(other.link.url)} by {error:.3g} on average "
                f"although both received the same weights; start it with the run's model and the same options"
            )


def _read_sizes(path: Any) -> dict[str, Any]:
    """Return the sizes in the ``config.json`` of a model; {} if it is not on this machine."""
    try:
        config = json.loads((Path(str(path)) / "config.json").read_text(encoding="utf-8"))
        config |= config.get("text_config") or {}
        return {name: config[name] for name in _SIZES if name in config}
    except (OSError, ValueError, TypeError):
        return {}
