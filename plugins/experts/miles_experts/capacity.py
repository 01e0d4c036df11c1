"""Capacity of experts (GShard, arXiv 2006.16668, section 2.2; Switch Transformers, arXiv 2101.03961, section 2.2).

An expert computes at most ``C = ceil(F * tokens * top_k / experts)`` tokens of a micro-batch. Assignments above C are dropped: the token
receives nothing from this expert, and its other weights do not change. With the policy ``probs`` an expert keeps the tokens with the
largest weights, with ``position`` the first ones; the token that comes first wins a tie. Megatron-Core has the same policies. A dropped
assignment has weight 0, so neither expert nor router receives a gradient from it. Its product is still computed, because experts of the
embedded trainer have no fixed-size buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.trainer import Context
from miles_embedded import Routed, active_context, routed_blocks

#: Passes with a capacity. A verification compares weights and kernels, and a rollout has no capacity.
LIMITED = ("old", "ref", "train")
#: Key in ``Context.attached`` of the (dropped, all) assignments of each layer; absent during recomputation, which counts nothing.
DROPPED = "experts.dropped"


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Return ``ceil(factor * tokens * top_k / experts)``, computed with the decimal digits of ``factor``."""
    return math.ceil(Fraction(str(factor)) * tokens * top_k / experts)


def find_kept(index: Tensor, weights: Tensor, experts: int, capacity: int, by_weight: bool) -> Tensor:
    """Return [rows, k] bool: which assignments are within the capacity of their expert.

    Args:
        index: [rows, k] experts.
        weights: [rows, k] their weights.
        experts: number of experts.
        capacity: assignments per expert.
        by_weight: keep the largest weights instead of the first rows.
    """
    flat = index.reshape(-1)
    order = torch.arange(len(flat), device=flat.device)
    if by_weight:
        order = weights.detach().reshape(-1).argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]
    counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    return torch.empty_like(flat, dtype=torch.bool).index_copy_(0, order, place < capacity).view_as(index)


def limit_capacity(model: nn.Module, factor: float, policy: str) -> None:
    """Make the experts of a model drop assignments above their capacity, in passes of the kinds ``LIMITED``.

    Args:
        model: a model of the embedded backend.
        factor: factor on the mean load.
        policy: ``probs`` or ``position``.
    """
    for found in routed_blocks(model):
        limit = partial(_limit, found, factor, policy == "probs")
        if found.top_k:
            found.router.register_forward_hook(partial(_limit_scores, found.top_k, limit))
        else:
            found.experts.register_forward_pre_hook(partial(_limit_weights, limit))


def _limit(found: Routed, factor: float, by_weight: bool, ctx: Context, index: Tensor, weights: Tensor) -> Tensor:
    capacity = capacity_of(factor, len(index), index.shape[1], found.count)
    kept = find_kept(index, weights, found.count, capacity, by_weight)
    if DROPPED in ctx.attached:
        ctx.attached[DROPPED].append((kept.numel() - kept.sum(), kept.numel()))
    return weights.masked_fill(~kept, 0)


def _limit_weights(limit: Callable[..., Tensor], experts: nn.Module, args: tuple[Tensor, ...]) -> Any:
    ctx = active_context()
    if ctx is None or ctx.kind not in LIMITED:
        return None
    hidden, index, weights = args
    return hidden, index, limit(ctx, index, weights)


def _limit_scores(
    top_k: int, limit: Callable[..., Tensor], router: nn.Module, args: Any, output: tuple[Tensor, Tensor]
) -> Any:
    """Limit a router whose scores [rows, experts] weigh the experts' input, 0 for experts that were not chosen."""
    ctx = active_context()
    if ctx is None or ctx.kind not in LIMITED:
        return None
    scores, logits = output
    index = scores.topk(top_k)[1]
    return torch.zeros_like(scores).scatter(-1, index, limit(ctx, index, scores.gather(-1, index))), logits


def count_dropped(ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the metric of the pass that collected ``DROPPED``, and stop collecting."""
    found = ctx.attached.pop(DROPPED)
    if not found:
        return {}
    dropped = torch.stack([each for each, _ in found]).sum()
    return {"moe/dropped_fraction": (dropped, torch.tensor(sum(total for _, total in found)))}
