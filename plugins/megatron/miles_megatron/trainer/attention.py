"""Attention over packed samples in torch, for Megatron-Core's local specification.

Megatron-Core's local attention supports neither packed samples nor context parallelism; TransformerEngine's, used on GPUs, supports both.
This module has the same interface and splits samples across context-parallel ranks in the same way: a sample has 2 x ranks pieces, and
rank r holds the r-th piece from the start and the r-th from the end. Keys and values are all-gathered, queries are not.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from miles_core.plugin import ConfigError


class PackedAttention(MegatronModule):
    """``core_attention`` of a layer, constructed with the arguments of Megatron-Core's attention modules."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **arguments: Any) -> None:
        super().__init__(config=config)
        self.scale = arguments.get("softmax_scale")
        self.group = pg_collection.cp
        inside = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.before: int | None = config.window_size[0] if inside else None
        latent = getattr(config, "multi_latent_attention", False)
        if latent and pg_collection.tp.size() > 1 and not config.sequence_parallel:
            raise ConfigError(  # the plan checks this too, unless it does not know the workers' GPUs
                "without a GPU, Megatron-Core's local modules compute wrong gradients of latent attention with tensor parallelism "
                "and without --sequence-parallel; add it, or use pipeline or context parallelism"
            )
        self.softmax_offset: Any = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state for Megatron-Core's checkpoints; sinks are sharded along the heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
    ) -> Tensor:
        """Compute attention.

        Args:
            query, key, value: [tokens, heads, head size].
            arguments: must contain ``packed_seq_params``.

        Returns:
            [tokens, heads x value size].
        """
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
            distance = positions[rank][:, None] - torch.arange(len(order))[None]
            allowed = (distance >= 0) & (distance <= (len(order) if self.before is None else self.before))
            q, k, v = (x.transpose(0, 1) for x in (query[start:end], k, v))
            out = self._attend(q, k, v, allowed.to(q.device), scale)
            found.append(out.transpose(0, 1).flatten(1))
        return torch.cat(found)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
        """Return [heads, queries, value size]. A sink is an extra logit per head whose softmax weight is discarded."""
        if self.softmax_offset is None:
            return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed, scale=scale)[0]
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~allowed, -torch.inf)
        sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    """Return [length]: the positions in a sample that a context-parallel rank holds. length: tokens of the sample on this rank."""
    if ranks == 1:
        return torch.arange(length)
    half = length // 2
    return torch.cat([rank * half + torch.arange(half), (2 * ranks - 1 - rank) * half + torch.arange(half)])


class _Gather(torch.autograd.Function):
    """All-gather [tokens, ...] to [ranks, tokens, ...]. The backward pass sums the gradients of all ranks for this rank's part."""

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
