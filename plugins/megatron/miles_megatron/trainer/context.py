"""Collectives of context-parallel ranks, each of which holds a part of every sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def sum_over_context(part: Tensor) -> Tensor:
    """All-reduce a tensor over context-parallel ranks. The backward pass returns the gradient unchanged to each rank."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return part
    found: Tensor = _SumEverywhere.apply(part, group)
    return found


@torch.no_grad()
def gather_over_context(part: Tensor) -> Tensor:
    """All-gather [n, ...] over context-parallel ranks to [ranks x n, ...], without a gradient."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


class _SumEverywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
