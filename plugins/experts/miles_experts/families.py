"""Model families whose routers have a correction bias. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: ``model_type`` in ``config.json`` -> name of the family.
WITH_BIAS = {
    "deepseek_v3": "DeepSeek-V3 and R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe": "GLM-4.5 to 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "minimax_m2": "MiniMax-M2",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone_moe": "EXAONE MoE",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "solar_open": "Solar Open",
    "afmoe": "AFMoE",
    "kimi_linear": "Kimi-Linear",
    "bailing_hybrid": "Ling 2.5",
    "nemotron_h": "Nemotron-H",
    "lfm2_moe": "LFM2 MoE",
}


def family_of(model: Mapping[str, Any]) -> str:
    """Return the ``model_type`` of the language model of a ``config.json``."""
    text = model.get("text_config")
    return str((text if isinstance(text, dict) and "model_type" in text else model).get("model_type", ""))
