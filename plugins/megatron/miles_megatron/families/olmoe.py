"""OLMoE: experts in every layer, one norm over all query heads and one over all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, common, experts_of
from miles_megatron.families.qwen3_moe import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``; its inner size is that of an expert."""
    a = Architecture(**common({"rms_norm_eps": 1e-5, "pad_token_id": 1, **config}), qk_norm="whole")
    renormalise = bool(config.get("norm_topk_prob", False))
    chosen = Experts(experts_of(config), config["num_experts_per_tok"], a.ffn, renormalise=renormalise)
    return replace(a, sparse=(True,) * a.layers, experts=chosen)
