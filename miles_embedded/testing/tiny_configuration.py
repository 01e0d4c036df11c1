"""Make a tiny configuration of any Transformers configuration class from its defaults.

Sizes are replaced by small ones, in the language model and in the towers; entries that determine the computation (activations, biases,
scales, layer types) keep the class's defaults. Windows, chunks and indexers become shorter than the compared sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

_TEXT: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "text_hidden_size", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_hidden_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "experts_per_token"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk", "sliding_window_size"), 5),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "topk_group"), 1),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim", "index_n_heads", "global_head_dim"), 16),
    "num_key_value_heads": 2, "v_head_dim": 12, "n_group": 2, "query_pre_attn_scalar": 16, "moe_layer_start_index": 1,
    "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0, "num_mtp_modules": 0,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "mlp_only_layers": [],
}  # fmt: skip
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "intermediate_size", "projection_dim", "projector_input_dim", "projector_output_dim",
                     "vision_output_dim", "encoder_ffn_dim", "mm_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layers", "temporal_patch_size"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads", "spatial_merge_size"), 2),
    "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "head_dim": 16, "num_position_embeddings": 16,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "window_size": 28,
}  # fmt: skip
#: Families whose code uses ``mrope_section`` although their defaults lack it.
_SECTIONED = (
    "ernie4_5_vl_moe_text",
    "glm4v",
    "glm46v",
    "glm_ocr",
    "hunyuan_vl",
    "glmga",
    "paddleocr_vl",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni",
)
#: Type of a configuration or of one of its parts -> entries that its defaults leave out, or that contradict the sizes above.
_OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 48, "audio_token_offset": 52},
    "apertus1p5_vision_tokenizer": {"codebook_size": 4, "base_channels": 32},
    "chameleon": {"vocabulary_map": {"<image>": 50, "IMGIMGAZ": 51, "IMGIMGBZ": 52}},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "codegen": {"rotary_dim": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"n_group": 1, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 50, "<|extra_200|>": 51, "<|visual token 000000|>": 52}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "gptj": {"rotary_dim": 4},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0], "downsample_rate": "1/2",
                        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
                                          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
    "molmo2_adapter": {"vision_feature_layer": [0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 55},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 55},
    "xmod": {"default_language": "en_XX"},
    "wavtokenizer_encoder": {"codebook_size": 4, "codebook_dim": 32},
}  # fmt: skip
#: Lists with one entry per layer; the default kinds are distributed over the tiny layers.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")


def tiny_configuration(kind: type[Any]) -> Any:
    """Make a configuration of this class.

    Args:
        kind: a subclass of Transformers' ``PretrainedConfig`` whose arguments have defaults.

    Raises:
        Exception: the class rejects these sizes; add an entry to ``families.FAMILIES`` then.
    """
    return kind(**_shrink(kind().to_dict(), kind, _TEXT))


def _shrink(values: Mapping[str, Any], kind: type[Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    parts: Mapping[str, Any] = getattr(kind, "sub_configs", None) or {}
    accepted = set(inspect.signature(kind.__init__).parameters)
    made: dict[str, Any] = {}
    media = iter(range(50, 64))
    for name, value in values.items():
        if isinstance(value, dict) and (name in parts or name.endswith("_config")):
            made[name] = _shrink_part(name, value, parts.get(name, kind))
        elif name in sizes and (value is not None or name in ("num_key_value_heads", "head_dim")):
            if name == "num_key_value_heads" and value == values.get("num_attention_heads"):
                made[name] = sizes["num_attention_heads"]
            elif not isinstance(value, list):
                made[name] = sizes[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            made[name] = next(media)
        elif name == "is_decoder" and sizes is _TEXT:  # BERT's kind attends in both directions by default
            made[name] = True
        elif name in _PER_LAYER and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            made[name] = [kinds[i % len(kinds)] for i in range(max(2, len(kinds)))]
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            made[name] = _shrink_rope(value, str(values.get("model_type")).startswith(_SECTIONED))
    layers = max((len(made[name]) for name in _PER_LAYER if name in made), default=0)
    for name in [n for n in ("num_hidden_layers", "num_layers") if n in made and layers]:
        made[name] = max(layers, made[name])
    for name in [n for n in _PER_LAYER if n in made]:
        made[name] = [made[name][i % len(made[name])] for i in range(layers)]
    own = _OWN.get(str(values.get("model_type")), {})
    made |= own
    return {
        name: value
        for name, value in made.items()
        if name in accepted or name in own or "kwargs" in accepted or isinstance(value, dict)
    }


def _shrink_part(name: str, value: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Make one part of a configuration: the language model, or a tower."""
    from transformers import CONFIG_MAPPING

    model_type = value.get("model_type", "")
    known = kind
    if model_type in CONFIG_MAPPING:  # ``get`` finds only entries that were accessed before
        known = CONFIG_MAPPING[model_type]
    text = not any(
        word in name
        for word in ("vision", "audio", "speech", "image", "encoder", "qformer", "projector", "adapter", "vq", "vae")
    )
    made = _shrink(value, known, _TEXT if text else _TOWER)
    return {"model_type": model_type, **made} if model_type else made


def _shrink_rope(value: dict[str, Any], sections: bool = False) -> dict[str, Any]:
    """Adapt rotary parameters to a tiny head; ``sections``: the class uses sections although its defaults lack them."""
    made = {n: _shrink_rope(v) if isinstance(v, dict) else v for n, v in value.items()}
    if "mrope_section" in made or sections:
        pairs = int(_TEXT["head_dim"] * (made.get("partial_rotary_factor") or 1.0)) // 2
        made["mrope_section"] = [pairs // 4, (pairs - pairs // 4) // 2, pairs - pairs // 4 - (pairs - pairs // 4) // 2]
    return made
