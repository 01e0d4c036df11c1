"""The reference of a server: a checkpoint in the trainer of ``miles verify``, computed in a wider type, with assumed deviations.

A deviation that the trainer can imitate (a number format, the dtype of the cache, an entry of ``config.json``) is scored as a model of
its own. A model with other entries is a directory with links to the checkpoint's files and a changed ``config.json``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.config.config import Config
from miles_core.config.load import load
from miles_core.contracts.emulation import Emulation
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import LearnerHandle
from miles_core.data.sample import Sample
from miles_core.plugin.model_config import model_config
from miles_core.run.make import make_run
from miles_core.run.parts import build_parts
from miles_core.run.prepare import apply_plan, prepare

#: Sampling options of a reference: the plain distribution of the model, from which the others are computed.
PLAIN_SAMPLING = {"rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": -1, "model.self_check": False}
#: Emulated dtypes of the cache.
CACHES = ("float8_e4m3fn", "float8_e5m2")
#: Names of entries of config.json -> the deviation, for entries that servers ignore.
_IGNORED = {
    "sliding_window": "the sliding window is ignored",
    "attn_logit_softcapping": "the softcap of attention logits is ignored",
    "final_logit_softcapping": "the softcap of the output logits is ignored",
}
_SCALES = {
    "logits_scaling": "the scale of the output logits is ignored",
    "logit_scale": "the scale of the output logits is ignored",
}


@dataclass(frozen=True)
class Deviation:
    """One assumed difference between the server and the checkpoint.

    Attributes:
        name, advice: the cause in words, and what to do.
        entries: changed entries of config.json.
        format: number format of the weights. inputs: whether inputs of products are rounded to it, too.
        cache: dtype of cached keys and values.
        before: token ids before the given ones.
    """

    name: str
    advice: str
    entries: Mapping[str, Any] = field(default_factory=dict, hash=False)
    format: str = ""
    inputs: bool = False
    cache: str = ""
    before: tuple[int, ...] = ()


class Reference:
    """Scores of samples by the checkpoint. At most one model is in memory.

    Args:
        words: options of ``miles train``, as the user gave them.
        config: the configuration of these words.
        directory: of the result; nothing is written there.
    """

    def __init__(self, words: Sequence[str], config: Config, directory: Path) -> None:
        self.words, self.config, self.directory = words, config, directory
        self._stack = AsyncExitStack()
        self._key: object = None
        self._learner: LearnerHandle | None = None
        plan, catalogue = prepare(config)
        self.run: Run = make_run(apply_plan(config, plan), plan, catalogue, directory)

    async def close(self) -> None:
        """Release the model."""
        await self._stack.aclose()

    async def score(
        self, samples: Sequence[Sample], assumed: Sequence[Deviation] = (), wider: bool = True
    ) -> list[np.ndarray]:
        """Score samples at temperature 1 with all deviations of ``assumed``.

        Returns:
            log-probabilities over the whole vocabulary, one array [response_length] per sample.

        Raises:
            MilesError: the trainer cannot imitate one of them.
        """
        return [row["log_probs"].astype(np.float64) for row in await self.columns(samples, (), assumed, wider=wider)]

    async def columns(
        self,
        samples: Sequence[Sample],
        names: Sequence[str],
        assumed: Sequence[Deviation] = (),
        top_k: int = 0,
        wider: bool = True,
    ) -> list[dict[str, np.ndarray]]:
        """Compute ``log_probs`` and further columns of the trainer; see ``score``."""
        before = [token for each in assumed for token in each.before]
        rows = [replace(s, tokens=[*before, *s.tokens], rollout_log_probs=None, fields={}) for s in samples]
        emulation = Emulation(
            encoded=any(each.format for each in assumed),
            activations=any(each.inputs for each in assumed),
            kv_dtype="".join(each.cache for each in assumed),
            wider=wider,
        )
        learner = await self._open(assumed)
        return await learner.columns(rows, "verify", ("log_probs", *names), top_k, emulation)

    async def _open(self, assumed: Sequence[Deviation]) -> LearnerHandle:
        entries = {name: item for each in assumed for name, item in each.entries.items()}
        format = "".join(each.format for each in assumed)
        key = (json.dumps(entries, sort_keys=True, default=repr), format)
        if self._learner is not None and key == self._key:
            return self._learner
        await self._stack.aclose()
        self._stack, self._learner = AsyncExitStack(), None
        config = self.config
        if format:
            config = load([*self.words, "--plugins", format, "--rollout-precision", format, "--emulate-precision"])
        changes: dict[str, Any] = {**PLAIN_SAMPLING, "model.dtype": self.config.model.dtype}
        if entries:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            changes["model.hf_checkpoint"] = str(change_checkpoint(self.config, Path(folder), entries))
        config = config.replace(changes, origin="miles verify --url")
        plan, catalogue = prepare(config)
        run = make_run(apply_plan(config, plan), plan, catalogue, self.directory)
        for policy in run.policies:
            policy.generates = False  # the server is the engine
        parts = await self._stack.enter_async_context(build_parts(run))
        self._learner, self._key = parts[0].learner, key
        return self._learner


def change_checkpoint(config: Config, directory: Path, entries: Mapping[str, Any]) -> Path:
    """Make a checkpoint of links in ``directory``, with changed entries of config.json. Returns ``directory``."""
    source = Path(config.model.hf_checkpoint or "")
    for path in source.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path.resolve())
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    inner = content["text_config"] if isinstance(content.get("text_config"), dict) else content
    inner.update(entries)
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def find_deviations(config: Config, added: Sequence[int], bos: int | None) -> Iterator[Deviation]:
    """Yield deviations of servers that the trainer can imitate for this checkpoint.

    Args:
        config: the configuration. added: tokens that the server reported to put before the given ones.
        bos: id of the tokenizer's first token, None without one.
    """
    front = tuple(added) or (() if bos is None else (bos,))
    if front:
        yield Deviation(
            f"the server adds the token{'s' if len(front) > 1 else ''} {', '.join(map(str, front))} before the given token ids",
            "switch off the server's special tokens for prompts of token ids (add_special_tokens=false), or train on the same prompts",
            before=front,
        )
    content = model_config(config.model.hf_checkpoint) or {}
    yield from _entries_of(content.get("text_config") or content)
    for manifest in config.schema.manifests.values():
        for name in manifest.formats:
            for inputs in (False, True):
                yield Deviation(
                    f"weights{' and activations' if inputs else ''} rounded to {name.upper()}",
                    f"serve the checkpoint in the dtype of training, train with --rollout-precision {name}, or correct it with --plugins tis",
                    format=name,
                    inputs=inputs,
                )
    for dtype in CACHES:
        yield Deviation(
            f"KV cache in {dtype}",
            "start the server with the KV cache in the model's dtype (kv-cache-dtype auto), or train with --kv-cache-dtype",
            cache=dtype,
        )


def _entries_of(content: Mapping[str, Any]) -> Iterator[Deviation]:
    advice = "update the server, or the options with which it overrides config.json ({}); check the config.json that it reads"
    for key, name in {**_IGNORED, **_SCALES}.items():
        if content.get(key):
            changed: dict[str, Any] = {key: None if key in _IGNORED else 1.0}
            if key == "sliding_window":
                changed |= {"use_sliding_window": False}
                if isinstance(types := content.get("layer_types"), list):
                    changed["layer_types"] = ["full_attention" if t == "sliding_attention" else t for t in types]
            yield Deviation(f"{name} ({key} of config.json)", advice.format(key), changed)
    if "norm_topk_prob" in content:
        done = "not normalised" if content["norm_topk_prob"] else "normalised"
        changed = {"norm_topk_prob": not content["norm_topk_prob"]}
        yield Deviation(
            f"router: weights of the chosen experts are {done} (norm_topk_prob)",
            advice.format("norm_topk_prob"),
            changed,
        )
    rope = content.get("rope_parameters") or {}
    theta = content.get("rope_theta") or rope.get("rope_theta")
    scaling = content.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    plain = {"rope_type": "default", "rope_theta": theta or 1e4}
    if isinstance(scaling, Mapping):
        yield Deviation(
            "rope scaling is ignored", advice.format("rope_scaling"), {"rope_scaling": None, "rope_parameters": plain}
        )
    if theta and theta != 1e4:
        default = {**rope, "rope_theta": 1e4} if rope else {"rope_type": "default", "rope_theta": 1e4}
        yield Deviation(
            f"rope theta 10000 in place of {theta:g} (rope_theta)",
            advice.format("rope_theta"),
            {"rope_theta": 1e4, "rope_parameters": default},
        )
