"""Builds Megatron-Core's configuration and this rank's model chunks from an architecture."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn.functional import silu

from miles_core.plugin import ConfigError
from miles_megatron.architecture import Architecture, Kind
from miles_megatron.layout import padded_vocabulary
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.attention import PackedAttention
from miles_megatron.trainer.delta import delta_spec
from miles_megatron.trainer.embedding import stop_padding_gradient
from miles_megatron.trainer.gating import allow_wide_weights, find_routers
from miles_megatron.trainer.latent import set_norm_epsilon, sum_rotary_gradients
from miles_megatron.trainer.mamba import mamba_spec
from miles_megatron.trainer.norm import CentredNorm, WholeNorm

#: Option that makes TransformerEngine's layers accumulate weight gradients in place. It is not passed to Megatron-Core, whose own layers
#: would need APEX for it.
ADD_IN_PLACE = "gradient_accumulation_fusion"


def has_transformer_engine() -> bool:
    """Whether the model uses TransformerEngine's modules (on a GPU) or Megatron-Core's local modules (on a CPU)."""
    return torch.cuda.is_available()


def transformer_config(a: Architecture, s: Sizes, dtype: torch.dtype, options: Mapping[str, Any]) -> TransformerConfig:
    """Build Megatron-Core's configuration.

    Args:
        dtype: dtype of parameters and activations.
        options: the user's fields of the configuration.

    Raises:
        ConfigError: Megatron-Core rejects the combination.
    """
    engine = has_transformer_engine()
    fields: dict[str, Any] = {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "ffn_hidden_size": a.ffn,
        "num_attention_heads": a.heads,
        "num_query_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "layernorm_epsilon": a.epsilon,
        "normalization": "RMSNorm",
        "qk_layernorm": bool(a.qk_norm or a.latent),
        "add_bias_linear": False,
        "add_qkv_bias": a.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "transformer_impl": "transformer_engine" if engine else "local",
        "calculate_per_token_loss": True,
        "variable_seq_lengths": s.pp > 1 and s.virtual == 1,
        # a batch of sends and receives would confuse activations and gradients if both neighbours are the same rank
        "batch_p2p_comm": torch.cuda.is_available() and s.virtual == 1,
        **_parallelism(s),
        **_experts(a, engine),
        **_latent(a),
        **_delta(a),
        **_mamba(a),
        **_rotary_and_mlp(a),
        **_windows(a),
        **_fusions(a, engine),
        **{name: value for name, value in options.items() if name != ADD_IN_PLACE},
    }
    if "attention_backend" in options:
        fields["attention_backend"] = AttnBackend[options["attention_backend"]]
    made = _construct(MLATransformerConfig if a.latent else TransformerConfig, fields, options)
    vars(made).update(_yarn(a))  # fields that Megatron-Core reads but does not declare
    return made


def _construct(kind: type[TransformerConfig], fields: dict[str, Any], options: Mapping[str, Any]) -> TransformerConfig:
    """Construct a configuration; converts Megatron-Core's own validation errors to ConfigError."""
    try:
        return kind(**fields)
    except (AssertionError, ValueError) as error:
        chosen = ", ".join(f"{name} = {value}" for name, value in options.items())
        raise ConfigError(f"Megatron-Core rejects these options ({chosen}): {error}; choose others") from error


def _fusions(a: Architecture, engine: bool) -> dict[str, Any]:
    """Return the fusion flags. Fused kernels keep less for the backward pass; on a CPU they have no benefit."""
    if not engine:
        return {}
    return {
        "bias_activation_fusion": a.gated,
        "bias_dropout_fusion": not a.mlp_bias,
        "apply_rope_fusion": a.latent is None and not _yarn(a) and not a.rotary.interleaved,
        "moe_permute_fusion": a.experts is not None,
    }


def _rotary_and_mlp(a: Architecture) -> dict[str, Any]:
    skipped = [int(skips) for skips in a.rotary.skipped]
    return {
        "rotary_interleaved": a.rotary.interleaved,
        "no_rope_freq": skipped if any(skipped) else None,
        "gated_linear_unit": a.gated,
        "activation_func": silu if a.gated else squared_relu,
    }


def _windows(a: Architecture) -> dict[str, Any]:
    """Return the fields of sliding windows, sinks, MLP biases and gpt-oss's clamped activation."""
    found: dict[str, Any] = {}
    if any(a.windows):
        # Megatron-Core counts the tokens before the query, without the query token
        every = None if all(a.windows) else [int(w > 0) for w in a.windows]
        found |= {"window_size": (max(a.windows) - 1, 0), "window_attn_skip_freq": every}
    if a.sinks:
        found |= {"softmax_type": "learnable"}
    if a.mlp_bias:
        found |= {
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
    return found


def _yarn(a: Architecture) -> dict[str, Any]:
    """Return the fields of YaRN (arXiv 2309.00071) without latent attention."""
    scaling = a.rotary.scaling
    if a.latent or scaling.get("rope_type") != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": scaling["factor"],
        "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": scaling.get("beta_fast") or 32.0,
        "yarn_beta_slow": scaling.get("beta_slow") or 1.0,
        "yarn_mscale": scaling.get("mscale"),
        "yarn_mscale_all_dim": scaling.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": scaling.get("truncate", True),
    }


def _parallelism(s: Sizes) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": s.virtual if s.virtual > 1 else None,
        "context_parallel_size": s.cp,
        "expert_model_parallel_size": s.ep,
        "expert_tensor_parallel_size": s.etp,
        "sequence_parallel": s.sequence,
        "overlap_p2p_comm": s.virtual > 1,
        "moe_token_dispatcher_type": "alltoall",  # others need rows of equal length, even for dense models
        "num_layers_in_first_pipeline_stage": s.first or None,
        "num_layers_in_last_pipeline_stage": s.last or None,
        "account_for_embedding_in_pipeline_split": s.embedding,
        "account_for_loss_in_pipeline_split": s.loss,
    }


def _experts(a: Architecture, engine: bool) -> dict[str, Any]:
    e = a.experts
    if e is None:
        return {}
    return {
        "num_moe_experts": e.count,
        "moe_router_topk": e.top_k,
        "moe_ffn_hidden_size": e.ffn,
        "moe_layer_freq": [int(sparse) for sparse in a.sparse],
        "moe_shared_expert_intermediate_size": e.shared or None,
        "moe_shared_expert_gate": e.shared_gate,
        "moe_router_score_function": e.score,
        "moe_router_pre_softmax": e.score == "softmax" and not e.renormalise,
        "moe_router_topk_scaling_factor": None if e.scale == 1.0 else e.scale,
        "moe_router_enable_expert_bias": e.correction,
        "moe_router_num_groups": e.groups if e.groups > 1 else None,
        "moe_router_group_topk": e.top_groups if e.groups > 1 else None,
        "moe_latent_size": e.latent or None,
        # also where engines multiply in BF16: their inputs differ by BF16's rounding, so rounding logits here too would add to the mismatch
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": engine,
        "moe_router_bias_update_rate": 0.0,
    }


def _latent(a: Architecture) -> dict[str, Any]:
    low = a.latent
    if low is None:
        return {}
    found: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": low.q_rank or None,
        "kv_lora_rank": low.kv_rank,
        "qk_head_dim": low.nope,
        "qk_pos_emb_head_dim": low.rope,
        "v_head_dim": low.value,
        "rope_type": "rope",
        "rotary_base": a.rotary.base,
    }
    scaling = a.rotary.scaling
    if scaling:
        found |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling.get("beta_fast", 32),
            "beta_slow": scaling.get("beta_slow", 1),
            "mscale": scaling.get("mscale", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        }
    return found


def _delta(a: Architecture) -> dict[str, Any]:
    """Return the fields of gated delta nets, gated attention and norms that multiply by 1 + weight."""
    gates = {"layernorm_zero_centered_gamma": a.centred, "attention_output_gate": a.output_gate}
    d = a.delta
    if d is None:
        return gates
    return gates | {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(mixer == "delta") for mixer in a.mixers],
        "linear_conv_kernel_dim": d.width,
        "linear_key_head_dim": d.key_size,
        "linear_value_head_dim": d.value_size,
        "linear_num_key_heads": d.key_heads,
        "linear_num_value_heads": d.value_heads,
    }


def _mamba(a: Architecture) -> dict[str, Any]:
    d = a.mamba
    if d is None:
        return {}
    return {
        "mamba_num_heads": d.heads,
        "mamba_head_dim": d.head_size,
        "mamba_num_groups": d.groups,
        "mamba_state_dim": d.state,
        "hetereogenous_dist_checkpoint": True,
    }


def block_spec(a: Architecture, config: TransformerConfig, stage: int | None) -> Any:
    """Return Megatron-Core's specification of the layers of a chunk. stage: its virtual pipeline stage, or None."""
    engine = has_transformer_engine()
    attending = copy.copy(config)  # Megatron-Core's own specification of delta nets exists for TransformerEngine only
    attending.experimental_attention_variant = None
    spec = get_gpt_decoder_block_spec(attending, engine, normalization="RMSNorm", vp_stage=stage)
    for attention in (layer.submodules.self_attention.submodules for layer in spec.layer_specs):
        if not engine:
            attention.core_attention = PackedAttention
        if a.qk_norm == "whole":
            attention.q_layernorm = partial(WholeNorm, a.heads)
            attention.k_layernorm = partial(WholeNorm, a.kv_heads)
        elif a.centred and not engine:
            attention.q_layernorm = attention.k_layernorm = CentredNorm
    first = get_transformer_layer_offset(config, vp_stage=stage)
    spec.layer_specs = [_mixed(a, layer, a.kinds[first + i]) for i, layer in enumerate(spec.layer_specs)]
    if a.centred and not engine:
        spec.layer_norm = CentredNorm
    return spec


def _mixed(a: Architecture, layer: Any, kind: Kind) -> Any:
    """Return the specification of a layer of this kind with the model's norms. layer: specification of one that attends."""
    changes: dict[str, Any] = {}
    engine = has_transformer_engine()
    if kind.mixer == "delta":
        changes["self_attention"] = delta_spec(layer.submodules.self_attention, TENorm if engine else WrappedTorchNorm)
    if kind.mixer == "mamba":
        changes["self_attention"] = mamba_spec(a, layer.submodules.self_attention)
    if kind.mixer in ("delta", "mamba"):
        # checkpoints name the first norm like TransformerEngine, which has it in the first linear layer
        names = layer.submodules.sharded_state_dict_keys_map
        changes["sharded_state_dict_keys_map"] = {k: v.replace("linear_qkv.", "in_proj.") for k, v in names.items()}
    if kind.mixer == "none":
        changes |= {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    if not kind.feed:
        changes |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    if a.centred and not engine:
        changes |= {"input_layernorm": CentredNorm, "pre_mlp_layernorm": CentredNorm}
    return replace(layer, submodules=replace(layer.submodules, **changes)) if changes else layer


def build_chunks(a: Architecture, s: Sizes, config: TransformerConfig, longest: int) -> list[nn.Module]:
    """Build this rank's model chunks without loading weights.

    Args:
        a: the architecture.
        s: parallel sizes.
        config: Megatron-Core's configuration.
        longest: tokens of the longest sample.
    """
    os.environ.pop(_UNFUSED, None)  # Megatron-Core sets this variable itself
    chunks = []
    for number in range(s.virtual):
        stage = number if s.virtual > 1 else None
        spec = block_spec(a, config, stage)
        scaling = a.rotary.scaling
        chunk = GPTModel(
            config,
            spec,
            vocab_size=padded_vocabulary(a, s.tp),
            max_sequence_length=longest,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=a.tied,
            position_embedding_type="yarn" if _yarn(a) else "rope" if a.rotary.share else "none",
            rotary_percent=a.rotary.share,
            rotary_base=int(a.rotary.base),
            rope_scaling=scaling.get("rope_type") == "llama3",
            rope_scaling_factor=float(scaling.get("factor", 8.0)),
            vp_stage=stage,
        )
        stop_padding_gradient(chunk, a.padding)
        if a.experts is not None and a.experts.wide_router:
            allow_wide_weights(chunk)
        if a.latent is not None:
            set_norm_epsilon(chunk, a.latent.epsilon)
        if a.latent is not None and s.tp > 1 and s.sequence and not has_transformer_engine():
            sum_rotary_gradients(chunk)
        chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    if config.attention_backend == AttnBackend.auto and config.bf16:
        os.environ[_UNFUSED] = "0"
    return chunks


def in_bf16(config: TransformerConfig, module: nn.Module) -> nn.Module:
    """Convert a module to BF16, except the routers' FP32 weights and correction biases, which stay the same tensors."""
    kept = [(router, router.expert_bias, router.weight.data) for router in find_routers(module)]
    made: nn.Module = Float16Module(config, module)
    for router, bias, weight in kept:
        router.expert_bias, router.weight.data = bias, weight
    return made


#: TransformerEngine's switch for unfused attention, which stores its scores: ten times slower, and its memory is not in the plan. Off
#: unless requested, so that a machine without fused attention raises an error.
_UNFUSED = "NVTE_UNFUSED_ATTN"


@contextmanager
def fused_attention() -> Iterator[None]:
    """Convert TransformerEngine's error about missing fused attention to a ConfigError with advice."""
    try:
        yield
    except ValueError as error:
        if "dot product attention backend" not in str(error):
            raise
        raise ConfigError(
            "TransformerEngine has neither flash nor fused attention for this model on this machine (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 "
            "shows why; set CUDNN_HOME to use another cuDNN than torch's); --attention-backend unfused works, but is about ten times "
            "slower and stores all scores"
        ) from error


def layer_numbers(chunk: nn.Module) -> tuple[int, ...]:
    """Return the 0-based indices in the whole model of a chunk's decoder layers."""
    model: Any = chunk
    return tuple(layer.layer_number - 1 for layer in model.decoder.layers)
