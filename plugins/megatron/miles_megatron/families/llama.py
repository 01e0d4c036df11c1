"""Llama 2 and 3 and Mistral: grouped-query attention without biases, a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.parts import Entry, attention, mlp, norms


def read(config: Mapping[str, Any]) -> Architecture:
    """From ``config.json``."""
    windows = (config["sliding_window"],) if config.get("sliding_window") else ()  # Mistral's, on every layer
    return Architecture(**common(config), qkv_bias=bool(config.get("attention_bias")), windows=windows)


def layer(a: Architecture, m: str, h: str, sparse: bool) -> Iterator[Entry]:
    """See ``miles_megatron.families``."""
    yield from (*norms(m, h), *attention(a, m, h), *mlp(m, h))
