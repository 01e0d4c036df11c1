"""Gate weights of replayed experts, per router family.

Replay fixes the indices only. The weights are recomputed from the trainer's own router logits gathered at those
indices, so the router keeps its gradient (arXiv 2510.11370, section 4). Selection-only terms (correction biases, group
limits) play no part. A rule is trusted only after ``embedded.matching_rule`` has found it equal, bit for bit, to what
the module itself computes on random input; so the same formula with another result dtype is a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Weights = Callable[[Tensor, Tensor, nn.Module], Tensor]


def softmax_then_gather(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Qwen3-MoE and its relatives: softmax over all experts, gather, renormalise iff ``norm_topk_prob``."""
    return softmax_in_float(logits, index, block).to(logits.dtype)


def softmax_in_float(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Mixtral: the same, always renormalised (it has no such setting), and the weights stay FP32."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, index)
    if setting(block, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def softmax_of_gathered(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """gpt-oss: softmax of the gathered logits."""
    return logits.gather(-1, index).softmax(-1, dtype=logits.dtype)


def sigmoid_scaled(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """DeepSeek-V3, GLM-4-MoE: sigmoid, gather, / (sum + 1e-20) iff ``norm_topk_prob``, * ``routed_scaling_factor``."""
    weights = logits.sigmoid().gather(-1, index)
    if setting(block, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * setting(block, "routed_scaling_factor", 1.0)


def sigmoid_plain(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """MiniMax-M2: sigmoid, gather, / sum, in FP32."""
    weights = logits.float().sigmoid().gather(-1, index)
    return weights / weights.sum(-1, keepdim=True)


RULES: tuple[Weights, ...] = (softmax_then_gather, softmax_in_float, sigmoid_scaled, sigmoid_plain, softmax_of_gathered)


def router_of(block: nn.Module) -> nn.Module | None:
    """The module of a mixture-of-experts block that scores experts: ``gate``, or ``router`` in gpt-oss."""
    found = getattr(block, "gate", None) or getattr(block, "router", None)
    return found if isinstance(found, nn.Module) else None


def setting(block: nn.Module, name: str, default: Any) -> Any:
    """A router setting, wherever this version of the family keeps it: the router, the block or the configuration."""
    experts = getattr(block, "experts", None)
    for owner in (router_of(block), block, getattr(block, "config", None), getattr(experts, "config", None)):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return default
