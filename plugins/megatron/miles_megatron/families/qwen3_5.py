"""The text models of Qwen3.5, dense and with experts: Qwen3-Next's layers, with the first projection of a gated delta net as four matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, Kind, experts_of
from miles_megatron.families.parts import Entry
from miles_megatron.families.qwen3_next import hybrid, hybrid_layer


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = hybrid(config)
    if a.family == "qwen3_5_text":
        return a
    experts = Experts(
        experts_of(config),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        shared=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )
    return replace(a, sparse=(True,) * a.layers, experts=experts)


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield from hybrid_layer(a, m, h, kind, _projection)


def _projection(a: Architecture, m: str, h: str) -> Entry:
    assert a.delta is not None
    d = a.delta
    sections = ((d.keys, d.keys, d.values), (d.values,), (d.value_heads,), (d.value_heads,))
    names = tuple(f"{h}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return Entry(f"{m}.in_proj.weight", names, "sections", 0, sections=sections)
