"""Tiny random checkpoints of many model families. The tests and the table of ``docs/families.md`` use them (``testing.comparison``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.plugin.detect import config_facts
from miles_core.plugin.facts import Facts
from miles_embedded.manifest import review
from miles_embedded.testing.image_families import IMAGE_FAMILIES
from miles_testing import tiny

_COMMON = {k: v for k, v in tiny.FAMILIES["qwen3"][1].items() if k != "head_dim"}
_HEADS = {**_COMMON, "head_dim": 16}
_LATENT = {
    k: v for k, v in tiny.FAMILIES["deepseek_v3"][1].items() if not k.startswith(("n_", "moe_", "num_experts", "topk"))
}
_INDEXED = {k: v for k, v in tiny.FAMILIES["deepseek_v32"][1].items() if k != "num_local_experts"}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA4 = tiny.ROUTER_FAMILIES["gemma4"][1]
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_TOWER, "image_size": 28, "patch_size": 14}
#: family -> (name of the configuration class, its arguments). Windows, chunks and indexer choices are shorter than the sequences.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **tiny.FAMILIES,
    **tiny.ROUTER_FAMILIES,
    **IMAGE_FAMILIES,
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_COMMON, **_MOE, "use_sliding_window": True, "sliding_window": 5, "shared_expert_intermediate_size": 16},
    ),
    "mistral": ("MistralConfig", {**_COMMON, "sliding_window": 5}),
    "ministral3": ("Ministral3Config", _HEADS),
    "gemma": ("GemmaConfig", _HEADS),
    "gemma2": (
        "Gemma2Config",
        {
            **_HEADS,
            **_ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", {**_HEADS, **_ALTERNATING}),
    "granite": (
        "GraniteConfig",
        {
            **_COMMON,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "cohere": ("CohereConfig", {**_COMMON, "logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", {**_COMMON, **_ALTERNATING, "logit_scale": 0.25}),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "dim_model_base": 16, "scale_emb": 3, "scale_depth": 1.4}),
    "hyperclovax": ("HyperCLOVAXConfig", {**_COMMON, "logits_scaling": 0.25}),
    "phi3": ("Phi3Config", {**_COMMON, "original_max_position_embeddings": 16, "rope_parameters": _LONG}),
    "llama, longrope": ("LlamaConfig", {**_COMMON, "rope_parameters": _LONG}),
    "llama, dynamic": (
        "LlamaConfig",
        {
            **_COMMON,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "phimoe": ("PhimoeConfig", {**_COMMON, **_LOCAL_MOE}),
    "glm4": ("Glm4Config", _HEADS),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_INDEXED, "indexer_types": ["full", "shared"]}),
    "olmo2": ("Olmo2Config", _COMMON),
    "olmoe": ("OlmoeConfig", {**_COMMON, "num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3Config", _COMMON),
    "starcoder2": ("Starcoder2Config", {**_COMMON, "sliding_window": None}),
    "ernie4_5": ("Ernie4_5Config", _COMMON),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _HEADS),
    "seed_oss": ("SeedOssConfig", _HEADS),
    "qwen3_next": ("Qwen3NextConfig", {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 16}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_HEADS, **_DELTA}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 16}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            **{"linear_num_heads": 4, "linear_head_dim": 16},
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**_COMMON, **_DELTA, "linear_num_key_heads": 4}),
    "lfm2": ("Lfm2Config", {**_COMMON, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_COMMON, **_MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **_LATENT,
            **{"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            **_HEADS,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 5,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**_HEADS, **_MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8}),
    "bamba": ("BambaConfig", {**_COMMON, **_MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_COMMON,
            **_LOCAL_MOE,
            **_MAMBA,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "mamba": ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "falcon_mamba": (
        "FalconMambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "chunk_size": 8},
            **{"num_heads": 8, "head_dim": 8, "n_groups": 2},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{name: value for name, value in _HEADS.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **_COMMON,
            **{"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
        },
    ),
    "gemma4, with towers": (
        "Gemma4Config",
        {
            "text_config": _GEMMA4,
            "vision_config": {**_TOWER, "head_dim": 16, "num_key_value_heads": 2},
            "audio_config": None,
        },
    ),
    "llama4, with towers": (
        "Llama4Config",
        {
            "text_config": tiny.ROUTER_FAMILIES["llama4"][1],
            "vision_config": {**_IMAGE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            "image_token_index": 60,
        },
    ),
}


def lacking(family: str) -> str:
    """Return why the plan refuses a family of this table with the installed Transformers; "" if it does not."""
    model = {"model_type": family.partition(",")[0]}
    return "; ".join(f"{p.headline}: {p.because}" for p in review(Facts(config_facts(model)), model).problems)


def family_checkpoint(family: str, directory: str | Path, seed: int = 0) -> Path:
    """Save a tiny random checkpoint like ``tiny_checkpoint``, for the families of this file."""
    import transformers

    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**values)
    return tiny.random_checkpoint(config, directory, seed)
