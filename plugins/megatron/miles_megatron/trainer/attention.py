"""Attention over packed samples in torch, for Megatron-Core's local specification.

Megatron-Core's own local attention knows neither packed samples nor context parallelism; TransformerEngine's, used on a GPU,
knows both. This one takes the same arguments and divides samples among context-parallel ranks in the same way: of 2 x ranks pieces of
a sample, rank r has the r-th from the start and the r-th from the end. Keys and values are gathered, queries stay.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """``core_attention`` of a layer; the arguments are those that Megatron-Core's attention modules are built with."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **arguments: Any) -> None:
        super().__init__(config=config)
        self.scale = arguments.get("softmax_scale")
        self.group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
    ) -> Tensor:
        """[tokens, heads, size] each -> [tokens, heads x size of a value]."""
        packed = arguments["packed_seq_params"]
        ranks, rank = self.group.size(), self.group.rank()
        bounds = (packed.cu_seqlens_q // ranks).tolist()
        if ranks > 1:
            key, value = _Gather.apply(key, self.group), _Gather.apply(value, self.group)
        else:
            key, value = key.unsqueeze(0), value.unsqueeze(0)
        repeat = query.shape[1] // key.shape[2]
        scale = self.scale or 1 / math.sqrt(query.shape[-1])
        found = []
        for start, end in itertools.pairwise(bounds):
            positions = torch.stack([zigzag(end - start, r, ranks) for r in range(ranks)])
            order = positions.flatten().argsort()
            k = key[:, start:end].flatten(0, 1)[order].repeat_interleave(repeat, 1)
            v = value[:, start:end].flatten(0, 1)[order].repeat_interleave(repeat, 1)
            allowed = positions[rank][:, None] >= torch.arange(len(order))[None]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[start:end], k, v))
            out = scaled_dot_product_attention(q, k, v, attn_mask=allowed.to(q.device), scale=scale)
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    """[length] the positions in a sample that a context-parallel rank holds; ``length`` is its share."""
    if ranks == 1:
        return torch.arange(length)
    half = length // 2
    return torch.cat([rank * half + torch.arange(half), (2 * ranks - 1 - rank) * half + torch.arange(half)])


class _Gather(torch.autograd.Function):
    """[tokens, ...] of each rank -> [ranks, tokens, ...]; backward sums what all ranks want of this one's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None
