"""Llama 2 and 3, and Mistral, which may have a window: grouped-query attention without biases, a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.parts import Entry, attention, mlp, norms


def read(config: Mapping[str, Any]) -> Architecture:
    """From ``config.json``."""
    return Architecture(**common(config))


def layer(a: Architecture, m: str, h: str, sparse: bool) -> Iterator[Entry]:
    """See ``miles_megatron.families``."""
    yield from (*norms(m, h), *attention(a, m, h), *mlp(m, h))
