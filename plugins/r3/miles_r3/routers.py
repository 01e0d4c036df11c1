"""Gate weights of replayed experts, per router family.

Replay fixes the indices only. The weights are recomputed from the trainer's own router logits gathered at those
indices, so the router keeps its gradient (arXiv 2510.11370, section 4). Terms that only affect the selection (correction biases, group
limits) are not used. A rule is used only after ``embedded.matching_rule`` has verified that it equals the result of the family's code
bitwise on random input. The same formula with another result dtype is therefore a separate rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded import find_routed

Weights = Callable[[Tensor, Tensor, nn.Module], Tensor]


def softmax_then_gather(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Qwen3-MoE and similar families: softmax over all experts, gather, renormalise if ``norm_topk_prob``."""
    return softmax_in_float(logits, index, block).to(logits.dtype)


def softmax_in_float(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Mixtral: softmax over all experts, gather, always renormalise; the weights stay FP32."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, index)
    if setting(block, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def softmax_unnormalized(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """Jamba: softmax over all experts, gather; the weights of a token do not sum to 1."""
    return logits.softmax(-1, dtype=torch.float32).gather(-1, index).to(logits.dtype)


def softmax_of_gathered(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """gpt-oss: softmax of the gathered logits."""
    return logits.gather(-1, index).softmax(-1, dtype=logits.dtype)


def sigmoid_scaled(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """DeepSeek-V3, GLM-4-MoE: sigmoid, gather, / (sum + 1e-20) iff ``norm_topk_prob``, * ``routed_scaling_factor``."""
    return _scale_sigmoid(logits, index, block, 1e-20)


def sigmoid_scaled_safely(logits: Tensor, index: Tensor, block: nn.Module) -> Tensor:
    """LFM2-MoE: like ``sigmoid_scaled`` with 1e-6."""
    return _scale_sigmoid(logits, index, block, 1e-6)


def _scale_sigmoid(logits: Tensor, index: Tensor, block: nn.Module, least: float) -> Tensor:
    weights = logits.sigmoid().gather(-1, index)
    if setting(block, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + least)
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
    softmax_unnormalized,
    sigmoid_scaled,
    sigmoid_scaled_safely,
    sigmoid_plain,
    softmax_of_gathered,
)


def router_of(block: nn.Module) -> nn.Module | None:
    """Return the router module of an MoE block under any family's attribute name; None if there is none."""
    found = find_routed(block)
    return None if found is None else found.scores


def setting(block: nn.Module, name: str, default: Any) -> Any:
    """Return a router setting from the router, the block or the configuration, depending on the family's version."""
    experts = getattr(block, "experts", None)
    for owner in (router_of(block), block, getattr(block, "config", None), getattr(experts, "config", None)):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return default
