"""Mixtral: Llama's attention; every layer has experts with matrices named w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, Kind, common, experts_of
from miles_megatron.families.parts import Entry, attention, experts, norms

PARTS = ("w1", "w3", "w2")


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = Architecture(**common(config))
    chosen = Experts(experts_of(config), config["num_experts_per_tok"], a.ffn)
    return replace(a, sparse=(True,) * a.layers, experts=chosen)


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    moe = f"{h}.block_sparse_moe"
    yield from (*norms(m, h), *attention(a, m, h), *experts(a, m, moe, PARTS, f"{moe}.e_score_correction_bias"))
