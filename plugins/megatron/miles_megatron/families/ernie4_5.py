"""ERNIE 4.5 (dense): Llama's layers, with a rotary embedding that rotates neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.llama import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    defaults = {
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "pad_token_id": 0,
    }
    a = Architecture(**common({**defaults, **config}))
    return replace(a, rotary=replace(a.rotary, interleaved=True))
