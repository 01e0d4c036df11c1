"""Llama 2, Llama 3 and Mistral: grouped-query attention without biases, optionally with a sliding window, and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_megatron.architecture import Architecture, Kind, common
from miles_megatron.families.parts import Entry, attention, mlp, norms


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    return Architecture(**common(config))


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield from (*norms(m, h), *attention(a, m, h), *mlp(m, h))
