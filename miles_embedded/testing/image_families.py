"""Configurations of tiny models that read images; a part of ``families.FAMILIES``. Ids 60 to 63 are the special tokens of images."""

from __future__ import annotations

from typing import Any

from miles_testing import tiny

_COMMON = {k: v for k, v in tiny.FAMILIES["qwen3"][1].items() if k != "head_dim"}
_HEADS = {**_COMMON, "head_dim": 16}
_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ALTERNATING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_TOWER, "image_size": 28, "patch_size": 14}
_CLIP = {**_IMAGE, "num_hidden_layers": 2, "projection_dim": 32, "model_type": "clip_vision_model"}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_QWEN3_TOWER = {**_QWEN_TOWER, "num_position_embeddings": 16}
_QWEN_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
_GLM_IDS = {
    **{"image_token_id": 60, "video_token_id": 61, "image_start_token_id": 62, "image_end_token_id": 63},
    **{"video_start_token_id": 58, "video_end_token_id": 59},
}


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


#: family -> (name of the configuration class, its arguments).
IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**_HEADS, **_ALTERNATING},
            "vision_config": _IMAGE,
            "mm_tokens_per_image": 4,
            "image_token_index": 60,
            "boi_token_index": 61,
            "eoi_token_index": 62,
            "tie_word_embeddings": False,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {**_HEADS, "model_type": "mistral"},
            "vision_config": {**_IMAGE, "image_size": 84, "head_dim": 16, "model_type": "pixtral"},
            "image_token_index": 60,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        {
            "text_config": {**_COMMON, **_sections(1, 1, 2)},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
            **_QWEN_IDS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_COMMON, **_sections(1, 1, 2)},
            "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_HEADS, **_sections(2, 3, 3, mrope_interleaved=True)},
            "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**_HEADS, **_MOE, **_sections(2, 3, 3, mrope_interleaved=True)},
            "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_QWEN_IDS,
        },
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "text_config": {
                **_HEADS,
                **_DELTA,
                **_sections(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True),
            },
            "vision_config": _QWEN3_TOWER,
            **_QWEN_IDS,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **_HEADS,
                **_MOE,
                **_DELTA,
                "shared_expert_intermediate_size": 16,
                **_sections(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True),
            },
            "vision_config": _QWEN3_TOWER,
            **_QWEN_IDS,
        },
    ),
    "glm4v": (
        "Glm4vConfig",
        {
            "text_config": {**_COMMON, **_sections(1, 0, 1, partial_rotary_factor=0.5)},
            "vision_config": {**_QWEN_TOWER, "image_size": 56, "patch_size": 14},
            **_GLM_IDS,
        },
    ),
    "internvl": (
        "InternVLConfig",
        {
            "text_config": {**_HEADS, "model_type": "qwen3"},
            "vision_config": {**_TOWER, "image_size": [28, 28], "patch_size": [7, 7], "model_type": "internvl_vision"},
            "image_token_id": 60,
        },
    ),
    "llava": (
        "LlavaConfig",
        {"text_config": {**_HEADS, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": 60},
    ),
    "llava_next": (
        "LlavaNextConfig",
        {
            "text_config": {**_HEADS, "model_type": "llama"},
            "vision_config": _CLIP,
            "image_token_index": 60,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
}
