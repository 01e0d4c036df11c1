"""Megatron-Core's model of an architecture: its configuration, its chunks on this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn
from torch.nn.functional import silu

from miles_core.plugin import ConfigError
from miles_megatron.architecture import Architecture
from miles_megatron.layout import padded_vocabulary
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.attention import PackedAttention
from miles_megatron.trainer.norm import WholeNorm

#: An option for TransformerEngine's layers alone, which add to weight gradients where these are kept; for its own layers Megatron-Core
#: would want APEX.
ADD_IN_PLACE = "gradient_accumulation_fusion"


def has_transformer_engine() -> bool:
    """Whether modules are TransformerEngine's: on a GPU; the local ones are Megatron-Core's and torch's."""
    return torch.cuda.is_available()


def transformer_config(a: Architecture, s: Sizes, dtype: torch.dtype, options: Mapping[str, Any]) -> TransformerConfig:
    """Megatron-Core's configuration.

    Args:
        a: the model.
        s: parallel sizes.
        dtype: of parameters and activations.
        options: fields of the configuration that were chosen.
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
        "gated_linear_unit": True,
        "activation_func": silu,
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
        # one batch of sends and receives would mix up activations and gradients where both neighbours are one rank
        "batch_p2p_comm": torch.cuda.is_available() and s.virtual == 1,
        "overlap_p2p_comm": s.virtual > 1,
        **_divided(s),
        **_experts(a, engine),
        **_latent(a),
        **_windows(a),
        **_fusions(a, engine),
        **{name: value for name, value in options.items() if name != ADD_IN_PLACE},
    }
    if "attention_backend" in options:
        fields["attention_backend"] = AttnBackend[options["attention_backend"]]
    made = _checked(MLATransformerConfig if a.latent else TransformerConfig, fields, options)
    for name, value in _yarn(a).items():
        setattr(made, name, value)  # fields that Megatron-Core reads and does not declare
    return made


def _checked(kind: type[TransformerConfig], fields: dict[str, Any], options: Mapping[str, Any]) -> TransformerConfig:
    """Megatron-Core checks more than the plan does."""
    try:
        return kind(**fields)
    except (AssertionError, ValueError) as error:
        chosen = ", ".join(f"{name} = {value}" for name, value in options.items())
        raise ConfigError(f"Megatron-Core refuses these options ({chosen}): {error}; choose others") from error


def _fusions(a: Architecture, engine: bool) -> dict[str, Any]:
    """Kernels that keep less for the backward pass; on a CPU they would only be compiled."""
    if not engine:
        return {}
    return {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": not a.mlp_bias,
        "apply_rope_fusion": a.latent is None and not _yarn(a),
        "moe_permute_fusion": a.experts is not None,
    }


def _windows(a: Architecture) -> dict[str, Any]:
    """Windows on some layers; what gpt-oss has beside them: sinks, biases, and a clamped gate of its own."""
    found: dict[str, Any] = {}
    if any(a.windows):
        # a token sees itself and so many before it
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
    """YaRN (arXiv 2309.00071) without latent attention."""
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


def _divided(s: Sizes) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": s.virtual if s.virtual > 1 else None,
        "context_parallel_size": s.cp,
        "expert_model_parallel_size": s.ep,
        "expert_tensor_parallel_size": s.etp,
        "sequence_parallel": s.sequence,
        "moe_token_dispatcher_type": "alltoall",  # others want rows of one length, of models without experts too
        "num_layers_in_first_pipeline_stage": s.first or None,
        "num_layers_in_last_pipeline_stage": s.last or None,
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


def block_spec(a: Architecture, config: TransformerConfig, stage: int | None) -> Any:
    """Megatron-Core's specification of the layers of a chunk; ``stage`` is its virtual one."""
    engine = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(config, engine, normalization="RMSNorm", vp_stage=stage)
    for attention in (layer.submodules.self_attention.submodules for layer in spec.layer_specs):
        if not engine:
            attention.core_attention = PackedAttention
        if a.qk_norm == "whole":
            attention.q_layernorm = partial(WholeNorm, a.heads)
            attention.k_layernorm = partial(WholeNorm, a.kv_heads)
    return spec


def build_chunks(a: Architecture, s: Sizes, config: TransformerConfig, longest: int) -> list[nn.Module]:
    """This rank's chunks of the model, empty of weights.

    Args:
        a: the model.
        s: parallel sizes.
        config: of Megatron-Core.
        longest: tokens of the longest sample.
    """
    os.environ.pop(_UNFUSED, None)  # Megatron-Core wants to say itself which kernels of attention there may be
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
            position_embedding_type="yarn" if _yarn(a) else "rope",
            rotary_percent=a.rotary.share,
            rotary_base=int(a.rotary.base),
            rope_scaling=scaling.get("rope_type") == "llama3",
            rope_scaling_factor=float(scaling.get("factor", 8.0)),
            vp_stage=stage,
        )
        chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    if config.attention_backend == AttnBackend.auto and config.bf16:
        os.environ[_UNFUSED] = "0"
    return chunks


def in_bf16(config: TransformerConfig, module: nn.Module) -> nn.Module:
    """A module in BF16. Routers' correction biases stay as they were loaded, in FP32 and in the tensors that are exported."""
    biases = [(m, m.expert_bias) for m in module.modules() if getattr(m, "expert_bias", None) is not None]
    made: nn.Module = Float16Module(config, module)
    for router, bias in biases:
        router.expert_bias = bias
    return made


#: TransformerEngine's switch of attention that stores its scores: ten times slower, and no memory that was planned for it. Off unless
#: it was asked for, so that a machine without fused attention says so.
_UNFUSED = "NVTE_UNFUSED_ATTN"


@contextmanager
def fused_attention() -> Iterator[None]:
    """Say what to do where TransformerEngine has no fused attention here."""
    try:
        yield
    except ValueError as error:
        if "dot product attention backend" not in str(error):
            raise
        raise ConfigError(
            "TransformerEngine has neither flash nor fused attention for this model on this machine (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 "
            "shows why; a cuDNN other than torch's is found through CUDNN_HOME); --attention-backend unfused computes without, "
            "about ten times slower and with all scores in memory"
        ) from error


def layer_numbers(chunk: nn.Module) -> tuple[int, ...]:
    """The decoder layers of a chunk, as numbers of the whole model from 0."""
    model: Any = chunk
    return tuple(layer.layer_number - 1 for layer in model.decoder.layers)
