"""Memory of a trainer with adapters on one GPU, for the plan. Does not import torch.

The base has one copy, in BF16 or in the codes of a number format, without gradients and optimizer states. Each parameter of an adapter has
a copy, an FP32 master, its gradient and two moments. Activations are those of a full training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_embedded import ModelSize, engine_usage, size_of, trainer_parts, training_of

#: Bytes per weight of a base in four bits and in other formats, with their scales (groups of 16 or larger blocks).
_FOUR_BITS, _EIGHT_BITS = 0.5625, 1.0625
FOUR_BITS = ("int4", "nvfp4", "mxfp4")
#: Elements of an adapter per rank and weight of its matrix, times the hidden size; an upper bound for usual shapes.
_PER_WEIGHT = 4.0
#: Parts of the names of matrices in feed-forward layers, and names of an attention's matrices.
_FEED_FORWARD = ("gate", "up_", "down", "w1", "w2", "w3", "fc", "input_linear", "output_linear")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``: the trainer, and an embedded engine that shares its base."""
    size = size_of(facts, model)
    if size is None or facts.value("model.device") == "cpu" or facts.value("trainer") != "embedded":
        return
    how = training_of(facts)
    base, full, precision = base_bytes(facts, size), trainer_parts(size, how), str(facts.value("train.precision"))
    own = adapter_parameters(facts, size) * how.share
    gathered = full.weights - (2 if how.reference else 1) * how.width * size.parameters * how.share
    shared = facts.value("lora.sync") == "adapter"
    parts = Parts(
        weights=base * (1 if shared or not how.reference else 2) + how.width * own + gathered,
        gradients=4 * own,
        optimizer=how.optimizer(own, full.activations),
        activations=full.activations,
        other=full.other,
    )
    note = f"trainer: adapters of rank {facts.value('lora.rank')} over a frozen base of {size.parameters / 1e9:,.3g} billion parameters ({precision})"
    yield Usage("trainer", "rank", parts, parts.other, note=note, processes=how.ranks, replaces=True)
    if facts.value("engine") == "embedded" and shares_base(facts):
        # codes of a shared base are the trainer's, too
        engine = engine_usage(facts, size, shares=True)
        yield replace(engine, parts=replace(engine.parts, weights=0.0), replaces=True)


def shares_base(facts: Facts) -> bool:
    """Whether engine and trainer share a frozen base, plain or encoded, under separate adapters."""
    here = facts.value("runtime") == "inline" and not facts.value("colocate")
    alike = facts.value("train.precision") == facts.value("rollout.precision")
    return bool(here and alike and facts.value("lora.sync") == "adapter")


def base_bytes(facts: Facts, size: ModelSize) -> float:
    """Return the bytes of the base on one rank. Codes are not divided among ranks; a module that runs has its weights decoded."""
    how, precision = training_of(facts), facts.value("train.precision")
    if precision in ("bf16", None):
        return float(how.width * size.parameters * how.share)
    per = _FOUR_BITS if precision in FOUR_BITS else _EIGHT_BITS
    return float(per * (size.parameters - size.embeddings) + how.width * (size.embeddings + size.layer))


def adapter_parameters(facts: Facts, size: ModelSize) -> float:
    """Return an upper estimate of the adapters' parameters: of all matrices of the parts of layers that a target may be in."""
    names = [str(name).rpartition(".")[2] for name in facts.value("lora.target_modules") or ()]
    every, experts = (
        "all-linear" in names,
        any("expert" in str(name) for name in facts.value("lora.target_modules") or ()),
    )
    inner = {name for name in names for part in _FEED_FORWARD if part in name}
    mixers = {*names} - inner - {"all-linear", "all-experts"}
    adapted = 0.0
    if every or mixers:
        adapted += size.attentions
    if size.state and (every or mixers - {*_ATTENTION} or (mixers and size.state.attention_names)):
        adapted += size.states
    if every or inner:
        adapted += size.feed_forward
    if experts:
        adapted += size.experts
    return _PER_WEIGHT * int(facts.value("lora.rank") or 1) * adapted / size.hidden
