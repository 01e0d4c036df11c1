"""Gated delta nets: Megatron-Core's module over packed samples, with flash-linear-attention's kernels or torch."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn.functional import softplus

from miles_formats import miscompiles_delta_rule
from miles_megatron.trainer.delta_rule import convolve, delta_rule, normalize

log = logging.getLogger(__name__)


class DeltaNet(GatedDeltaNet):
    """Megatron-Core's gated delta net, with the decay in FP32 as in Transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _replace_kernels()
        super().__init__(*args, **kwargs)

    @jit_fuser
    def _compute_g_and_beta(self, A_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log decay, FP32, and rate of [batch, tokens, heads]; Megatron-Core computes exp(A_log) in the dtype of parameters."""
        return -A_log.float().exp() * softplus(alpha.float() + dt_bias), beta.sigmoid()


@cache
def _replace_kernels() -> None:
    """Let Megatron-Core's module call torch if flash-linear-attention is missing, cannot run, or computes wrong gradients."""
    if common.HAVE_FLA and torch.cuda.is_available() and not miscompiles_delta_rule():
        return
    if common.HAVE_FLA and torch.cuda.is_available():
        log.warning(
            "gated delta nets run in torch, which is slower: with this version of Triton, flash-linear-attention computes wrong gradients on Hopper "
            "GPUs; 3.7.1 is right"
        )
    common.HAVE_FLA, common.l2norm = True, normalize
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = convolve, delta_rule


def delta_spec(attention: ModuleSpec, norm: type) -> ModuleSpec:
    """Return the specification of a gated delta net.

    Args:
        attention: specification of attention, whose linear layers are used here too.
        norm: class of norms.
    """
    layers = attention.submodules

    class OutputNorm:
        """The norm of a delta net's output multiplies by its weight, also if the model's other norms multiply by 1 + weight."""

        def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
            own = copy.copy(config)
            own.layernorm_zero_centered_gamma = False
            return norm(own, hidden_size, eps)

    submodules = GatedDeltaNetSubmodules(layers.linear_qkv, OutputNorm, layers.linear_proj)
    return ModuleSpec(module=DeltaNet, submodules=submodules)
