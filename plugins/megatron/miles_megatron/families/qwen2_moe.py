"""Qwen2-MoE: Qwen2's attention, routed experts, and a shared expert with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_megatron.architecture import Architecture, common
from miles_megatron.families.qwen3_moe import layer, with_experts

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    made = Architecture(**common(config), qkv_bias=bool(config.get("qkv_bias", True)))
    return with_experts(made, config, shared=config["shared_expert_intermediate_size"], shared_gate=True)
