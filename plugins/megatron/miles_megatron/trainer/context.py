"""Context-parallel ranks, each of which has part of every sample: what they put together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def everywhere(part: Tensor) -> Tensor:
    """The sum over context-parallel ranks; each rank's gradient is that of its own part."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return part
    found: Tensor = _SumEverywhere.apply(part, group)
    return found


@torch.no_grad()
def gathered(part: Tensor) -> Tensor:
    """[n, ...] of each rank -> [ranks x n, ...], without a gradient."""
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
