"""Converts between the checkpoint's tensors and tensor-parallel shards of Megatron-Core's tensors.

``shard`` takes the checkpoint's full tensors and returns one rank's shard; ``join`` takes the shards of all ranks, in rank order, and
returns the checkpoint's tensors. Both only move elements, so ``join`` after ``shard`` reproduces every byte. The layouts are:

``plain``            one tensor, split along an axis.
``vocabulary``       split along rows, after padding with zero rows to a multiple of the ranks; ``join`` drops the padding.
``qkv``              queries, keys and values interleaved by query group: the queries of a group, its key, its value. With an output
                     gate, the checkpoint's first tensor has the gate of each head after its query; a group has its gates after its queries.
``gate_up``          each rank holds its rows of the gate projection, then its rows of the up projection.
``stacked``          all experts in one tensor of the checkpoint, [experts, in, out] (weights) or [experts, out] (biases).
``sections``         the sections of all tensors one after another, each split along rows. With groups, the checkpoint's tensors interleave
                     the sections by group.
``stacked_gate_up``  as ``stacked``, with gate and up in alternate output columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import Entry


def shard(entry: Entry, tensors: Sequence[Tensor], a: Architecture, rank: int = 0, size: int = 1) -> Tensor:
    """Return one rank's shard of a tensor.

    Args:
        entry: the tensor.
        tensors: the checkpoint's tensors in the order of ``entry.checkpoint``.
        a: the architecture.
        rank, size: rank and size in the group that splits this tensor.
    """
    if entry.layout in ("gate_up", "stacked_gate_up"):
        gate, up = tensors if entry.layout == "gate_up" else _alternate(_expert(entry, tensors[0]))
        return torch.cat([_cut(gate, 0, rank, size), _cut(up, 0, rank, size)])
    if entry.layout == "sections":
        return torch.cat([_cut(section, 0, rank, size) for section in _sections(entry, tensors)])
    if entry.layout == "qkv":
        return _cut(_interleaved(tensors, a), 0, rank, size)
    whole = tensors[0]
    if entry.layout == "stacked":
        whole = _expert(entry, whole)
    if entry.layout == "vocabulary":
        whole = torch.cat([whole, whole.new_zeros(padded_vocabulary(a, size) - len(whole), *whole.shape[1:])])
    return _cut(whole, entry.axis, rank, size)


def join(entry: Entry, shards: Sequence[Tensor], a: Architecture) -> list[Tensor]:
    """Return the checkpoint's tensors of an entry; for a stacked layout, this expert's slice.

    Args:
        entry: the tensor.
        shards: the shards of all ranks that split this tensor, in rank order; one shard if it is not split.
        a: the architecture.
    """
    if entry.layout in ("gate_up", "stacked_gate_up"):
        halves = [s.chunk(2) for s in shards]
        gate, up = (torch.cat([h[i] for h in halves]) for i in (0, 1))
        if entry.layout == "gate_up":
            return [gate, up]
        both = torch.stack([gate, up], 1).flatten(0, 1)
        return [both.t().contiguous() if both.dim() == 2 else both]
    if entry.layout == "sections":
        return _ungrouped(entry, shards)
    whole = shards[0] if entry.axis is None or len(shards) == 1 else torch.cat(list(shards), entry.axis)
    if entry.layout == "qkv":
        return _separated(whole, a)
    if entry.layout == "stacked" and whole.dim() == 2:
        return [whole.t().contiguous()]
    return [whole[: a.vocab] if entry.layout == "vocabulary" else whole]


def padded_vocabulary(a: Architecture, size: int) -> int:
    """Return the number of embedding rows, padded to a multiple of ``size`` ranks."""
    return -(-a.vocab // size) * size


def _cut(tensor: Tensor, axis: int | None, rank: int, size: int) -> Tensor:
    if axis is None or size == 1:
        return tensor
    if tensor.shape[axis] % size:
        raise ValueError(f"{tensor.shape[axis]} rows cannot be split evenly across {size} ranks")
    return tensor.chunk(size, axis)[rank]


def _expert(entry: Entry, stacked: Tensor) -> Tensor:
    """Return one expert of a stacked tensor; a weight is transposed to [out, in]."""
    assert entry.expert is not None
    one = stacked[entry.expert]
    return one.t() if one.dim() == 2 else one


def _alternate(both: Tensor) -> tuple[Tensor, Tensor]:
    return both[0::2], both[1::2]


def _interleaved(tensors: Sequence[Tensor], a: Architecture) -> Tensor:
    """Return queries, keys and values of the checkpoint as one tensor in the layout ``qkv``."""
    groups = [t.reshape(a.kv_heads, -1, *t.shape[1:]) for t in tensors]
    if a.output_gate:
        groups[0] = _swap(groups[0], a.heads // a.kv_heads, 2)
    return torch.cat(groups, 1).flatten(0, 1)


def _separated(whole: Tensor, a: Architecture) -> list[Tensor]:
    """Return the checkpoint's queries, keys and values: the inverse of ``_interleaved``."""
    heads = a.heads // a.kv_heads
    per = heads * a.head_dim * (2 if a.output_gate else 1)
    groups = whole.reshape(a.kv_heads, -1, *whole.shape[1:])
    parts = list(groups.split([per, a.head_dim, a.head_dim], 1))
    if a.output_gate:
        parts[0] = _swap(parts[0], 2, heads)
    return [p.flatten(0, 1) for p in parts]


def _swap(rows: Tensor, first: int, second: int) -> Tensor:
    """Return [groups, rows, ...] with rows of order (first, second, ...) reordered to (second, first, ...)."""
    return rows.unflatten(1, (first, second, -1)).transpose(1, 2).flatten(1, 3)


def _sections(entry: Entry, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sections of all tensors of the checkpoint, each with the rows of all groups."""
    found: list[Tensor] = []
    for tensor, sizes in zip(tensors, entry.sections, strict=True):
        groups = tensor.unflatten(0, (entry.groups, -1))
        found += [part.flatten(0, 1) for part in groups.split([size // entry.groups for size in sizes], 1)]
    return found


def _ungrouped(entry: Entry, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the checkpoint's tensors from the shards of all ranks: the inverse of ``_sections`` and the split across ranks."""
    rows = [size // len(shards) for sizes in entry.sections for size in sizes]
    by_rank = [shard.split(rows) for shard in shards]
    sections = iter([torch.cat(parts) for parts in zip(*by_rank, strict=True)])
    found = []
    for sizes in entry.sections:
        groups = [next(sections).unflatten(0, (entry.groups, -1)) for _ in sizes]
        found.append(torch.cat(groups, 1).flatten(0, 1))
    return found
