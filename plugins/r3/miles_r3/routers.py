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

from miles_embedded import find_routed

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


def softmax_scaled(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Gemma 4: softmax over all experts in FP32, gather, renormalise, times a learnt scale of each expert."""
    weights = softmax_in_float(logits, index, block)
    scale = getattr(getattr(block, "router", None), "per_expert_scale", None)
    return weights if scale is None else weights * scale[index]


def sigmoid_of_gathered(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Llama 4: sigmoid of the gathered logits in FP32."""
    return logits.gather(-1, index).float().sigmoid().to(logits.dtype)


RULES: tuple[Weights, ...] = (
    softmax_then_gather,
    softmax_in_float,
    softmax_scaled,
    sigmoid_scaled,
    sigmoid_plain,
    softmax_of_gathered,
)


def router_of(block: nn.Module) -> nn.Module | None:
    """The module of a mixture-of-experts block whose output are the logits of its experts, whatever the family calls it."""
    found = find_routed(block)
    return None if found is None else found.scores


def setting(block: nn.Module, name: str, default: Any) -> Any:
    """A router setting, wherever this version of the family keeps it: the router, the block or the configuration."""
    experts = getattr(block, "experts", None)
    for owner in (router_of(block), block, getattr(block, "config", None), getattr(experts, "config", None)):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return default
