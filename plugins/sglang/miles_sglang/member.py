"""One server of a pool, and the checks that it computes the same as the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from miles_core.plugin import redact
from miles_sglang.answers import Answer
from miles_sglang.link import ServerLeft, SglangError
from miles_sglang.server import ServerLink

T = TypeVar("T")

#: Entries of ``server_info`` that must be the same on all servers.
_SAME = (
    "version",
    "model_type",
    "architectures",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "skip_tokenizer_init",
    "sampling_backend",
)
#: Entries of ``config.json`` that determine the sizes of the weights.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "n_routed_experts", "num_local_experts",
)  # fmt: skip
#: Number of tokens that a server and another one score, and the mean difference of their log-probs at which they have different weights, as a
#: share of the standard deviation. Other kernels and batches cause about 1 % in BF16; other weights more than 100 %.
_PROBE, _DIFFERENT = 32, 0.2


@dataclass(eq=False)
class Member:
    """A server.

    Attributes:
        link, info: connection to it, and its ``server_info`` and ``model_info``.
        serving: it takes requests.
        version: version of its weights; empty before the first update.
        adapters: names of the adapters that it has.
        open: number of open requests.
        pinged: a look at its process is in progress.
        gone, cause: set once it has left, with the reason.
    """

    link: ServerLink
    info: Mapping[str, Any]
    serving: bool = False
    version: str = ""
    adapters: set[str] = field(default_factory=set)
    open: int = 0
    pinged: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""

    def serves(self, body: Mapping[str, Any]) -> bool:
        """Whether it has the weights for a request."""
        return self.serving and ("lora_path" not in body or body["lora_path"] in self.adapters)

    async def until_gone(self, asked: Awaitable[T]) -> T:
        """Return the result of a call of the server. Raises ServerLeft if the server leaves meanwhile."""
        call, gone = asyncio.ensure_future(asked), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise ServerLeft(f"{redact(self.link.url)} left: {self.cause}")
        finally:
            call.cancel()
            gone.cancel()


@dataclass(frozen=True)
class Model:
    """What the servers of a run must serve.

    Attributes:
        checkpoint: the run's checkpoint.
        config: the language model's keys of its ``config.json``.
        receives: updates replace all weights; otherwise the servers receive adapters of this checkpoint.
    """

    checkpoint: Path
    config: Mapping[str, Any]
    receives: bool = True

    def check(self, member: Member, first: Member) -> None:
        """Raise SglangError unless a server has the run's model, and the same SGLang and number formats as the first server."""
        url, info = redact(member.link.url), member.info
        ours, theirs = self.config.get("architectures"), info.get("architectures")
        if ours and theirs and ours != theirs:
            raise SglangError(
                f"--sglang-url {url}: the server serves {' '.join(theirs)}, and --hf-checkpoint {self.checkpoint} is {' '.join(ours)}; "
                "start it with this model"
            )
        for name, size in _read_sizes(info.get("model_path")).items():
            if name in self.config and size != self.config[name]:
                raise SglangError(
                    f"--sglang-url {url}: the server's model {info['model_path']} has {name} = {size}, and --hf-checkpoint "
                    f"{self.checkpoint} has {self.config[name]}; start it with this model"
                )
        for name in _SAME:
            if info.get(name) != first.info.get(name):
                what = "SGLang" if name == "version" else f"{name} ="
                raise SglangError(
                    f"--sglang-url {url}: the server has {what} {info.get(name)}, and {redact(first.link.url)} has {first.info.get(name)}; "
                    "all servers of a run must be alike"
                )

    def probe(self) -> dict[str, Any]:
        """Return the body of a request that scores some tokens: low ids, which are plain text."""
        return {
            "input_ids": [token % int(self.config["vocab_size"]) for token in range(10, 10 + _PROBE)],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }

    def compare(self, new: tuple[Member, Answer], old: tuple[Member, Answer]) -> None:
        """Raise SglangError unless two servers with the same weights answered ``probe`` alike."""
        (member, found), (other, expected) = ((each, answer.columns["prompt_log_probs"]) for each, answer in (new, old))
        error = float(np.abs(found - expected).mean())
        if not error <= _DIFFERENT * expected.std():
            raise SglangError(
                f"--sglang-url {redact(member.link.url)}: its log-probs differ from those of {redact(other.link.url)} by {error:.3g} on average "
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
