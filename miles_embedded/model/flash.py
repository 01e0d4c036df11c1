"""Torch's flash attention over packed sequences of unequal lengths (Dao 2023, FlashAttention-2), on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Largest head dimension that the kernel supports.
_WIDEST = 256


@dataclass
class Sequences:
    """Sequences of queries and of the keys that they attend to, each packed one after the other.

    Attributes:
        queries: [sequences + 1] int32 on the device: where each sequence starts, and the end of the last one.
        keys: likewise.
        longest_query: an upper bound on the length of a sequence.
        longest_key: likewise.
        causal: whether a query attends only to the keys up to its own position, where the last query is at the last key; otherwise to all keys
            of its sequence.
        offsets: what a kernel derives from the above, for the layers that follow.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    offsets: dict[Any, Any] = field(default_factory=dict, repr=False)


def flash_supports(query: Tensor) -> bool:
    """Whether the kernel supports this query on a GPU: half precision, and a GPU that can run it."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _WIDEST
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def pad_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make heads contiguous and pad them with zeros to one width, a multiple of 8 (DeepSeek-V3 has 192 and 128), as the kernel requires.
    Zeros change neither scores nor sums."""
    wide = -(-q.shape[-1] // 8) * 8
    q, k, v = (pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x.contiguous() for x in (q, k, v))
    return q, k, v


def flash_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scaling: float) -> tuple[Tensor, ...]:
    """Attend without gradient.

    Args:
        q: [queries, heads, dim].
        k: [keys, kv heads, dim].
        v: [keys, kv heads, dim].
        sequences: which keys a query attends to.
        scaling: factor on the scores.

    Returns:
        output [queries, heads, dim], log-sum-exp [heads, queries] float32, and two tensors for the backward pass.
    """
    of = sequences
    return torch.ops.aten._flash_attention_forward(
        q, k, v, of.queries, of.keys, of.longest_query, of.longest_key, 0.0, of.causal, False, scale=scaling
    )[:4]
