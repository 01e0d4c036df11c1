"""How a tensor of Megatron-Core is made of the checkpoint's tensors, cut for tensor parallelism, and made into them again.

A layout is a pair of functions. ``shard`` takes the checkpoint's tensors whole and returns one rank's part; ``join`` takes the parts
of all ranks, in order, and returns the checkpoint's tensors. Only elements are moved, so ``join`` of all shards is equal in
every byte.

``plain``            one tensor, cut along an axis.
``vocabulary``       the same along rows, with rows of zeros at the end so that the cut is even; ``join`` drops them.
``qkv``              queries, keys and values interleaved by query group: the queries of a group, its key, its value.
``gate_up``          each rank holds its rows of the gate and then its rows of the up projection.
``stacked``          all experts in one tensor of the checkpoint, [experts, in, out] (weights) or [experts, out] (biases).
``stacked_gate_up``  the same with gate and up in alternate outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import Entry


def shard(entry: Entry, tensors: Sequence[Tensor], a: Architecture, rank: int = 0, size: int = 1) -> Tensor:
    """One rank's part of a tensor.

    Args:
        entry: which one.
        tensors: the checkpoint's, in the order of ``entry.checkpoint``.
        a: the model.
        rank, size: in the group that splits this tensor.
    """
    if entry.layout in ("gate_up", "stacked_gate_up"):
        gate, up = tensors if entry.layout == "gate_up" else _alternate(_expert(entry, tensors[0]))
        return torch.cat([_cut(gate, 0, rank, size), _cut(up, 0, rank, size)])
    if entry.layout == "qkv":
        return _cut(_interleaved(tensors, a), 0, rank, size)
    whole = tensors[0]
    if entry.layout == "stacked":
        whole = _expert(entry, whole)
    if entry.layout == "vocabulary":
        whole = torch.cat([whole, whole.new_zeros(padded_vocabulary(a, size) - len(whole), *whole.shape[1:])])
    return _cut(whole, entry.axis, rank, size)


def join(entry: Entry, shards: Sequence[Tensor], a: Architecture) -> list[Tensor]:
    """The checkpoint's tensors; of a stacked one this expert's slice, see ``stack``.

    Args:
        entry: which one.
        shards: the parts of all ranks that split this tensor, in order; one where it is not split.
        a: the model.
    """
    if entry.layout in ("gate_up", "stacked_gate_up"):
        halves = [s.chunk(2) for s in shards]
        gate, up = (torch.cat([h[i] for h in halves]) for i in (0, 1))
        if entry.layout == "gate_up":
            return [gate, up]
        both = torch.stack([gate, up], 1).flatten(0, 1)
        return [both.t().contiguous() if both.dim() == 2 else both]
    whole = shards[0] if entry.axis is None or len(shards) == 1 else torch.cat(list(shards), entry.axis)
    if entry.layout == "qkv":
        return _separated(whole, a)
    if entry.layout == "stacked" and whole.dim() == 2:
        return [whole.t().contiguous()]
    return [whole[: a.vocab] if entry.layout == "vocabulary" else whole]


def padded_vocabulary(a: Architecture, size: int) -> int:
    """Rows of the embedding, padded so that ``size`` ranks have equally many."""
    return -(-a.vocab // size) * size


def _cut(tensor: Tensor, axis: int | None, rank: int, size: int) -> Tensor:
    if axis is None or size == 1:
        return tensor
    if tensor.shape[axis] % size:
        raise ValueError(f"{tensor.shape[axis]} rows cannot be split among {size} ranks")
    return tensor.chunk(size, axis)[rank]


def _expert(entry: Entry, stacked: Tensor) -> Tensor:
    """One expert of a stacked tensor, with a weight's outputs first."""
    assert entry.expert is not None
    one = stacked[entry.expert]
    return one.t() if one.dim() == 2 else one


def _alternate(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0::2], both[1::2]


def _interleaved(tensors: Sequence[Tensor], a: Architecture) -> Tensor:
    groups = [t.reshape(a.kv_heads, -1, *t.shape[1:]) for t in tensors]
    return torch.cat(groups, 1).flatten(0, 1)


def _separated(whole: Tensor, a: Architecture) -> list[Tensor]:
    per = a.heads // a.kv_heads * a.head_dim
    groups = whole.reshape(a.kv_heads, -1, *whole.shape[1:])
    return [p.flatten(0, 1) for p in groups.split([per, a.head_dim, a.head_dim], 1)]
