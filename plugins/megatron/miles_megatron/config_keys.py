"""Checks the entries of ``config.json`` that change what a model computes against what Megatron-Core's model supports.

The modules of ``families`` read the sizes. These tables cover all other entries: an entry in ``_FIXED`` must have a supported value, and
an unknown entry whose name suggests computation ("scale", "bias", "window") must have a value that disables it. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
_GROUPED = (
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "n_shared_experts",
    "norm_topk_prob",
    "moe_intermediate_size",
)
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_QWEN_EXPERTS = ("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_HYBRID = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
           "layer_types", "full_attention_interval", "mamba_ssm_dtype")  # fmt: skip
_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_chunk_size", "attn_layer_indices",
          "layers_block_type", "layer_types")  # fmt: skip
#: No limits, as a float and as Transformers writes it.
_UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], (0.0, float("inf")))
#: Entries that the family's module reads, or that have no effect in its checkpoints.
_READ: dict[str, tuple[str, ...]] = {
    "llama": ("pretraining_tp",),
    "mistral": ("sliding_window",),
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS,
    "qwen2_moe": (*_WINDOWS, *_QWEN_EXPERTS, "qkv_bias", "shared_expert_intermediate_size"),
    "qwen3_moe": (*_WINDOWS, *_QWEN_EXPERTS),
    "mixtral": ("sliding_window", "router_jitter_noise"),
    "deepseek_v3": (
        *_LATENT,
        *_GROUPED,
        "first_k_dense_replace",
        "pretraining_tp",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
    ),
    "glm4_moe": (*_GROUPED, "first_k_dense_replace", "attention_bias", "use_qk_norm"),
    "glm4_moe_lite": (*_LATENT, *_GROUPED, "pretraining_tp", "mlp_layer_types"),
    "minimax_m2": ("rotary_dim", "router_jitter_noise"),
    "gpt_oss": ("sliding_window", "layer_types"),
    "seed_oss": ("attention_bias", "pretraining_tp"),
    "smollm3": ("no_rope_layers", "no_rope_layer_interval", "layer_types", "pretraining_tp"),
    "olmoe": ("norm_topk_prob",),
    "nemotron_h": (
        *_GROUPED,
        "layers_block_type",
        "layer_types",
        "hybrid_override_pattern",
        "attention_head_dim",
        "layer_norm_epsilon",
        "norm_eps",
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_ssm_cache_dtype",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
        "chunk_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap",
        "moe_latent_size",
        "rescale_prenorm_residual",
        "use_mamba_kernels",
        "num_logits_to_keep",
    ),
    "bamba": (*_MAMBA, "z_loss_coefficient", "num_logits_to_keep", "use_mamba_kernels"),
    "qwen3_next": (*_HYBRID, *_QWEN_EXPERTS, "shared_expert_intermediate_size"),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": (*_HYBRID, "moe_intermediate_size", "shared_expert_intermediate_size"),
}
#: Entries and their supported values; the first value also applies if the entry is missing.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_causal": (True,),
}
_FIXED_BY_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v3": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    "glm4_moe_lite": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (True,),
        "first_k_dense_replace": (1,),
    },
    "minimax_m2": {
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "layernorm_full_attention_beta": (1.0,),
        "layernorm_linear_attention_beta": (1.0,),
        "layernorm_mlp_beta": (1.0,),
        "norm_topk_prob": (True,),
    },
    "gpt_oss": {
        "attention_bias": (True,),
        "swiglu_limit": (7.0,),
        "swiglu_alpha": (1.702,),
    },
    "seed_oss": {"attention_out_bias": (False,)},
    "smollm3": {"use_sliding_window": (False,), "sliding_window": (None,)},
    "ernie4_5": {"use_bias": (False,)},
    "olmoe": {"clip_qkv": (None,)},
    "nemotron_h": {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "residual_in_fp32": (False,),
        "time_step_limit": _UNLIMITED,
        "sliding_window": (None,),
    },
    "bamba": {
        "mamba_n_groups": (1,),
        "mamba_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "time_step_limit": _UNLIMITED,
    },
    "qwen3_next": {"attn_output_gate": (True,)},
    "qwen3_5_text": {"attn_output_gate": (True,)},
    "qwen3_5_moe_text": {
        "attn_output_gate": (True,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
}
#: Families whose rotary embedding may rotate only a part of each head.
_PARTIAL = ("glm4_moe", "minimax_m2", "bamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
#: Entries of all families that the tables of weights and sizes read, or that do not affect the computation. MTP layers draft tokens; the
#: model's own log-probs do not depend on them.
_COMMON = re.compile(
    r"model_type|architectures|auto_map|num_hidden_layers|hidden_size|intermediate_size|vocab_size|num_attention_heads|num_key_value_heads"
    r"|head_dim|rms_norm_eps|tie_word_embeddings|max_position_embeddings|rope_parameters|rope_scaling|rope_theta|partial_rotary_factor"
    r"|num_nextn_predict_layers|num_mtp_modules|use_mtp|mtp_\w+"
    r"|num_experts|num_local_experts|n_routed_experts|num_experts_per_tok|experts_per_token|initial_context_length"
    r"|\w*_token_id|\w*dropout|initializer_range|use_cache|output_\w+|router_aux_loss_coef|quantization_config|torch_dtype|dtype"
    r"|transformers_version|_\w+|id2label|label2id|problem_type|return_dict|chunk_size_feed_forward|is_encoder_decoder"
)
#: Words in the name of an entry that may affect the computation.
_TELLING = re.compile(
    r"act|alibi|attn|attention|bias|cap|clip|clamp|compress|conv|cross|embed|expert|factor|gate|gating|head|index|layer|limit|logit|mamba|moe"
    r"|mrope|mult|mup|norm|parallel|pattern|position|prenorm|qk|qkv|relu|residual|rope|rotary|router|routing|scal|sink|skip|sliding|softmax"
    r"|state|temperature|tie|top_?k|tower|window",
)


def find_foreign(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each entry with which Megatron-Core's model would differ from the checkpoint's model."""
    family = str(config.get("model_type"))
    fixed = _FIXED | _FIXED_BY_FAMILY.get(family, {})
    read = _READ.get(family, ())
    for key, value in config.items():
        if key in read or (value is None and key not in fixed):
            continue
        if key in fixed:
            if value is not None and value not in fixed[key]:
                yield f"{key} is {value!r}, and it supports only {' or '.join(map(repr, fixed[key]))}"
        elif not _COMMON.fullmatch(key) and _TELLING.search(key) and not _is_off(key, value):
            yield f"it does not support {key}, which is {value!r:.60}"
    yield from _rotary(config, family)


def _is_off(key: str, value: Any) -> bool:
    """Whether the value of an unknown entry disables it."""
    if key == "attn_type_list" or key == "layer_types":
        return isinstance(value, list) and all(kind in (1, "full_attention") for kind in value)
    factor = re.search(r"scal|mult|factor|beta", key) is not None
    return value in (False, 0, "", [], {}) or (factor and value == 1)


def _rotary(config: Mapping[str, Any], family: str) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        yield f"it supports only one rotary embedding for all layers, and rope_parameters is {rope!r:.60}"
        return
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and family not in _PARTIAL:
        yield f"partial_rotary_factor is {share}, and it rotates whole heads of {family} models only"


def layer_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sliding window of each layer in tokens, as in Transformers' model of the family.

    0 means full attention. The result is empty if no layer has a window."""
    family, layers = str(config.get("model_type")), int(config["num_hidden_layers"])
    size = int(config.get("sliding_window") or 0)
    if family not in _SLIDING or (family.startswith("qwen") and not config.get("use_sliding_window")):
        size = 0
    listed = config.get("layer_types")
    if family in ("mistral", "mixtral", "qwen3_moe") or not isinstance(listed, list):
        inside = [_SLIDING[family](i, config) for i in range(layers)] if size else []
    else:
        inside = [kind == "sliding_attention" for kind in listed]
    return tuple(size * slides for slides in inside) if size and any(inside) else ()


#: family -> whether layer i has the window if ``layer_types`` is missing.
_SLIDING: dict[str, Any] = {
    **dict.fromkeys(("mistral", "mixtral", "qwen3_moe"), lambda i, config: True),
    **dict.fromkeys(("qwen2", "qwen3"), lambda i, config: i >= config.get("max_window_layers", 28)),
    "qwen2_moe": lambda i, config: i % 2 == 0 and i < config.get("max_window_layers", 28),
    "gpt_oss": lambda i, config: i % 2 == 0,
}
