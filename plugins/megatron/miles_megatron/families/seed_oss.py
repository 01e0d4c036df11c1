"""Seed-OSS: Llama's layers, with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.llama import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    return Architecture(
        **common({"head_dim": 128, "pad_token_id": 1, **config}), qkv_bias=bool(config.get("attention_bias", True))
    )
