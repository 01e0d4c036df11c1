"""MiniMax-M2: Mixtral's tensor names, sigmoid routing with a correction bias, one norm over all query heads and one over all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture, Experts, common, experts_of
from miles_megatron.families.mixtral import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = Architecture(**common(config), qk_norm="whole")
    if config.get("rotary_dim"):
        a = replace(a, rotary=replace(a.rotary, share=config["rotary_dim"] / a.head_dim))
    given = (experts_of(config), config["num_experts_per_tok"], a.ffn)
    # as in SGLang; a BF16 model of Transformers rounds the checkpoint's FP32 router
    chosen = Experts(*given, score="sigmoid", correction=True, wide_router=True)
    return replace(a, sparse=(True,) * a.layers, experts=chosen)
