"""Generates ``options.json``: the fields of Megatron-Core's configurations that are options of this plugin.

    python -m miles_megatron.regenerate [SOURCE] > plugins/megatron/miles_megatron/options.json

``SOURCE`` is the folder ``megatron/core``, by default the installed one. Its source is parsed, not imported, so this needs neither torch
nor a GPU. Every field is either an option or in ``NOT_OPTIONS`` with a reason, so that the plugin accepts no flag without effect.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Source file -> configuration classes; the first class that declares a field owns it.
SOURCES = {
    "model_parallel_config.py": ("ModelParallelConfig",),
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "optimizer/optimizer_config.py": ("OptimizerConfig",),
    "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}
_CHECKPOINT = "it is a property of the model, read from the checkpoint's config.json"
_CORE = "an option of core sets it"
_ADAPTER = "the trainer sets it"
_RANDOM = "it would make a policy's log-probabilities random"
_NO_USE = "a training step does not read it"
_NOT_YET = "the trainer does not support it"
#: Name pattern -> why such fields are not options.
NOT_OPTIONS: dict[str, str] = {
    # the model
    r"num_layers|hidden_size|num_attention_heads|num_query_groups|ffn_hidden_size|kv_channels|num_moe_experts": _CHECKPOINT,
    r"softmax_(scale|type)|layernorm_(epsilon|zero_centered_gamma)|add_(bias_linear|qkv_bias)|gated_linear_unit": _CHECKPOINT,
    r"glu_linear_offset|activation_func(_clamp_value)?|rotary_.*|rope_type|window_.*|normalization|qk_(layernorm|l2_norm)": _CHECKPOINT,
    r"attention_output_gate|multi_latent_attention|no_rope_freq|experimental_attention_variant.*|dsa_.*|linear_.*": _CHECKPOINT,
    r"moe_shared_expert_(intermediate_size|gate)|moe_layer_freq|moe_(ffn_hidden|latent)_size|mrope_section|mamba_.*": _CHECKPOINT,
    r"moe_router_(topk|num_groups|group_topk|pre_softmax|topk_scaling_factor|score_function|enable_expert_bias)": _CHECKPOINT,
    r"(q|kv)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim|beta_(fast|slow)|mscale.*|original_max_position.*": _CHECKPOINT,
    r"is_hybrid_model|use_mamba_mem_eff_path|apply_residual_connection_post_layernorm|apply_query_key_layer_scaling": _CHECKPOINT,
    r"mtp_.*|moe_apply_probs_on_input|use_mup|mup_.*|heterogeneous_.*|hetereogenous_.*": _CHECKPOINT,
    # core
    r"lr|min_lr|weight_decay|adam_.*|clip_grad|fp16|bf16|params_dtype|moe_aux_loss_coeff|transformer_impl": _CORE,
    r"num_layers_at_(start|end)_in_bf16|first_last_layers_bf16": _CORE,
    # the trainer
    r".*_func|timers|calculate_per_token_loss|variable_seq_lengths|pipeline_dtype|autocast_dtype|enable_autocast": _ADAPTER,
    r"gtp_weight_remat_size|expert_gtp_weight_remat_size|perform_initialization|use_cpu_initialization|init_.*": _ADAPTER,
    r"embedding_init_.*|output_layer_init_method|_cpu_offloading_context|optimizer|decoupled_weight_decay": _ADAPTER,
    r"quant_recipe|moe_enable_routing_replay|moe_router_load_balancing_type|deallocate_pipeline_outputs": _ADAPTER,
    r"use_distributed_optimizer|average_in_collective|gradient_reduce_div_fusion|moe_router_(dtype|fusion)": _ADAPTER,
    # random perturbations
    r"hidden_dropout|attention_dropout|moe_input_jitter_eps|moe_router_force_.*|moe_token_dropping": _RANDOM,
    r"moe_expert_rank_capacity_factor": _RANDOM,
    # inference and tests
    r"inference_.*|use_inference_.*|flash_decode|cache_mla_latents|nccl_all_reduce_for_prefill|symmetric_ar_type": _NO_USE,
    r"moe_pad_expert_input_to_capacity": _NO_USE,
    r"mlp_chunks_for_.*|moe_pad_experts_for_cuda_graph_inference|test_mode|barrier_with_L1_time|config_logger_dir": _NO_USE,
    r"cross_entropy_.*|batch_invariant_mode|moe_layer_recompute|moe_per_layer_logging|moe_z_loss_coeff": _NO_USE,
    r"grad_norm_skip_threshold|log_num_zeros_in_grad|check_for_.*|log_max_attention_logit|mtp_standalone": _NO_USE,
    # features that the trainer lacks
    r"fp8.*|fp4.*|tp_only_amax_red|.*_fp8|.*_fp4|.*mxfp8.*|disable_parameter_transpose_cache|keep_fp8_.*": _NOT_YET,
    r"moe_router_padding_.*|activation_func_fp8_input_store|use_kitchen.*|kitchen_.*|qk_clip.*": _NOT_YET,
    r".*cuda_graph.*|optimizer_cuda_graph|use_te_rng_tracker|cpu_offloading.*|.*offload_modules|.*offloading.*": _NOT_YET,
    r"activation_offload_fraction|min_offloaded_tensor_size|delta_offload_.*|moe_paged_stash.*|delay_wgrad_compute": _NOT_YET,
    r"overlap_moe_expert_parallel_comm|ep_overlap_.*|overlap_dispatch_.*|moe_shared_expert_overlap": _NOT_YET,
    r"hierarchical_.*|hybrid_context_parallel|max_seqlen_per_dp_cp_rank|expert_tensor_parallel_num_weight_shards": _NOT_YET,
    r"tensor_parallel_num_weight_shards|num_microbatches_with_partial_.*|defer_embedding_.*|wgrad_deferral_limit": _NOT_YET,
    r"tp_comm_.*|use_ring_exchange_p2p|pipeline_model_parallel_(layout|comm_backend)": _NOT_YET,
    r"muon_.*|lion_.*|soap_.*|adaptive_muon_.*|sgd_momentum|decoupled_.*|loss_scale.*|initial_.*|min_loss_.*": _NOT_YET,
    r"hysteresis|use_layer_wise_.*|apply_wd_to_qk_layernorm|overlap_param_gather.*|overlap_p2p_comm.*|batch_p2p_.*": _NOT_YET,
    r"microbatch_group_size_per_vp_stage|use_megatron_fsdp|use_custom_fsdp|.*fsdp.*|.*_sharding_strategy|nccl_ub": _NOT_YET,
    r"disable_symmetric_registration|suggested_.*|num_distributed_optimizer_instances|param_name_patterns_.*": _NOT_YET,
    r"moe_.*(glu_interleave|hybridep|deepep|ncclep|flex_dispatcher|single_grouped|quantile).*|mla_down_proj_fusion": _NOT_YET,
    r"moe_router_topk_limited_devices|use_grouped_gemm_for_.*|use_transformer_engine_op_fuser|use_te_activation_func": _NOT_YET,
    r"use_fused_weighted_squared_relu|fused_single_qkv_rope|fused_residual_rmsnorm": _NOT_YET,
    r"clone_scatter_output_in_embedding|high_priority_a2a_comm_stream|pin_cpu_.*|num_buckets|align_param_gather": _NOT_YET,
    r"reduce_scatter_with_.*|pad_buckets_.*|memory_efficient_layer_norm": _NOT_YET,
}
#: Choices of options with the type ``torch.dtype``.
DTYPES = ("float32", "bfloat16", "float16", "uint8")


def rows(core: Path) -> list[dict[str, Any]]:
    """Return name, owner, type, choices and Megatron-Core's default of every field that is an option.

    Args:
        core: the folder ``megatron/core``.

    Raises:
        ValueError: a field has a type that flags do not support and is not in ``NOT_OPTIONS``.
    """
    found: dict[str, dict[str, Any]] = {}
    for file, owners in SOURCES.items():
        tree = ast.parse((core / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in owners:
                for entry in node.body:
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                        name = entry.target.id
                        if why_not(name) is None and name not in found:
                            found[name] = {"name": name, "owner": node.name, **_type(name, entry.annotation)}
                            found[name]["default"] = _default(entry.value)
    return list(found.values())


def why_not(name: str) -> str | None:
    """Return why a field is not an option; None if it is one."""
    return next((why for pattern, why in NOT_OPTIONS.items() if re.fullmatch(pattern, name)), None)


def _type(name: str, annotation: ast.expr) -> dict[str, Any]:
    text = re.sub(r"^Optional\[(.*)\]$", r"\1", ast.unparse(annotation))
    if text.startswith("Literal["):
        choices = list(ast.literal_eval(f"[{text[8:-1]}]"))
        return {"type": type(choices[0]).__name__, "choices": choices}
    if text == "torch.dtype":
        return {"type": "dtype", "choices": list(DTYPES)}
    if text == "AttnBackend":
        return {"type": "attention", "choices": ["flash", "fused", "unfused", "local", "auto"]}
    if text.lower() == "list[str]" or text == "Union[str, List[str]]":
        return {"type": "words", "choices": []}
    if text in ("int", "float", "bool", "str"):
        return {"type": text, "choices": []}
    raise ValueError(f"{name}: flags do not support the type {text}; add the field to NOT_OPTIONS with a reason")


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    return ast.unparse(value) if value is not None else "none"


def main() -> None:
    """Write the table to standard output."""
    spec = find_spec("megatron.core") if len(sys.argv) < 2 else None
    if spec is None and len(sys.argv) < 2:
        raise SystemExit("megatron-core is not installed: give the folder megatron/core of its source")
    core = Path(sys.argv[1]) if spec is None else Path((spec.submodule_search_locations or [""])[0])
    print("[\n" + ",\n".join(json.dumps(row) for row in rows(core)) + "\n]")


if __name__ == "__main__":
    main()
