"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with other norms inside attention.

Transformers' modules normalise the compressed queries, keys and values with an epsilon of 1e-6 whatever ``rms_norm_eps`` is (1e-5 in the
published checkpoint), as DeepSeek-V3's modules do. ``mlp_layer_types`` lists the layers with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.architecture import Architecture
from miles_megatron.families import deepseek_v3
from miles_megatron.families.deepseek_v3 import layer

__all__ = ["layer", "read"]


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    a = deepseek_v3.read(config)
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (a.layers - 1)]
    return replace(a, sparse=tuple(kind == "sparse" for kind in kinds))
