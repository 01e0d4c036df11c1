"""SmolLM3: Llama's layers, some of them without rotary embedding (every fourth one in the published model)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.llama import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = Architecture(**common({"tie_word_embeddings": True, "rope_theta": 2e6, "pad_token_id": 128004, **config}))
    every = config.get("no_rope_layer_interval") or 4
    rotated = config.get("no_rope_layers") or [(i + 1) % every for i in range(a.layers)]
    return replace(a, rotary=replace(a.rotary, skipped=tuple(not rotates for rotates in rotated)))
