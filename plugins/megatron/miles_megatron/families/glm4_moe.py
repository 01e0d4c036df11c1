"""GLM-4.5, 4.6 and 4.7 with experts: DeepSeek-V3's layers with grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_megatron.architecture import Architecture, common, dense_first
from miles_megatron.families.deepseek_v3 import grouped, layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    return Architecture(
        **common(config) | {"sparse": dense_first(config)},
        qkv_bias=bool(config.get("attention_bias")),
        qk_norm="head" if config.get("use_qk_norm") else "",
        experts=grouped(config),
    )
