"""How a micro-batch is laid out: one row of tokens, no padding, prompts of a group computed once.

A group's samples start with the same tokens. What they share (the *trunk*) is computed once and every sample continues it
with a *branch* that sees the trunk and itself; a sample that shares nothing is all trunk. So linear layers, norms and
experts see each distinct token once, and only attention knows about the tree.

Two things bound the trunk. An input column (``Batch.inputs``) that differs between siblings, a replayed choice of experts
say, makes rows different even where the tokens agree, so the trunk ends at the first such row, whatever the column means. And rows
that no trained position needs, the last token of every sample to begin with, are not computed at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_core.data.batch import Batch, Ragged

Ints = NDArray[np.int64]


@dataclass
class Segments:
    """Runs of consecutive physical rows: where each starts, how long it is, and (branches) the index of its trunk."""

    start: Ints
    length: Ints
    trunk: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Packing:
    """The physical layout of one micro-batch of T flat tokens in R rows.

    Attributes:
        rows: [R] index of each physical row in the flat columns.
        positions: [R] position of each row within its sample.
        row_of: [T] the physical row that computes a flat token; -1 where none does or its sample does not need it.
        trunks: segments that attend to themselves, causally.
        branches: segments that attend to their trunk and to themselves; siblings are neighbours.
        sources: [M] physical row whose output predicts each target.
        targets: [M] flat index of each target (``loss_mask`` is not 0), ascending.
        spans: [R] for how long a sequence each row's rotary frequencies are; None where all samples use one set.
    """

    rows: Tensor
    positions: Tensor
    row_of: Tensor
    trunks: Segments
    branches: Segments
    sources: Tensor
    targets: Tensor
    spans: Ints | None = None


def pack(batch: Batch, share: bool = True) -> Packing:
    """Lay out ``batch``. ``share=False`` computes every sample by itself."""
    device = batch.tokens.device
    starts = batch.starts.cpu().numpy()
    targets = target_positions(batch)
    needed = needed_rows(batch, targets)
    trunk_of, shared, order = _tree(batch, needed, share)
    own = needed[order] - shared  # rows of each branch, or of a trunk of its own
    if not len(order):  # nothing is trained here; a model still wants a row
        trunk_of, shared, order, own = (np.array([n], np.int64) for n in (0, 1, 0, 0))

    # Row runs in physical order: each group's trunk, then its branches.
    leader = np.ones(len(order), bool)
    leader[1:] = trunk_of[1:] != trunk_of[:-1]
    alone = shared == 0
    length = np.stack([np.where(leader & ~alone, shared, 0), np.maximum(own, 0)], 1).astype(np.int64)
    row = (length.ravel().cumsum() - length.ravel()).reshape(length.shape)
    trunk_row = row[leader, 0]
    rows = spans(np.stack([starts[order], starts[order] + shared], 1).ravel(), length.ravel())
    row_of = np.full(len(batch.tokens), -1, np.int64)
    used = np.minimum(shared, needed[order])
    row_of[spans(starts[order], used)] = spans(trunk_row[trunk_of], used)
    row_of[spans(starts[order] + shared, length[:, 1])] = spans(row[:, 1], length[:, 1])

    branch = ~alone & (length[:, 1] > 0)
    is_trunk = leader & (length.sum(1) > 0)
    trunks = Segments(row[is_trunk, 0], np.where(alone, length[:, 1], shared)[is_trunk], np.full(is_trunk.sum(), -1))
    branches = Segments(row[branch, 1], length[branch, 1], trunk_of[branch])
    positions = rows - np.repeat(starts, batch.lengths.cpu().numpy())[rows]
    return Packing(
        rows=torch.from_numpy(rows).to(device),
        positions=torch.from_numpy(positions).to(device),
        row_of=torch.from_numpy(row_of).to(device),
        trunks=trunks,
        branches=branches,
        sources=torch.from_numpy(row_of[targets - 1]).to(device),
        targets=torch.from_numpy(targets).to(device),
    )


def spans(start: Ints, length: Ints) -> Ints:
    """The concatenation of ``range(start[i], start[i] + length[i])``."""
    end = length.cumsum()
    within = np.arange(end[-1] if len(end) else 0) - np.repeat(end - length, length)
    return np.repeat(start, length) + within


def target_positions(batch: Batch) -> Ints:
    """[M] flat indices of the tokens with a loss mask."""
    targets = batch.mask.cpu().numpy().nonzero()[0]
    first = np.zeros(len(batch.tokens) + 1, bool)
    first[batch.starts.cpu().numpy()] = True
    if first[targets].any():
        raise ValueError("loss_mask is 1 on the first token of a sample, which nothing predicts")
    return targets


def needed_rows(batch: Batch, targets: Ints | None = None) -> Ints:
    """[N] how many leading tokens of each sample must be inputs: up to the one before its last target."""
    targets = target_positions(batch) if targets is None else targets
    starts, lengths = batch.starts.cpu().numpy(), batch.lengths.cpu().numpy()
    owner = np.repeat(np.arange(len(batch)), lengths)[targets]
    needed = np.zeros(len(batch), np.int64)
    np.maximum.at(needed, owner, targets - starts[owner])
    return needed


def row_counts(batch: Batch, share: bool = True) -> list[tuple[list[int], int, list[int]]]:
    """What each group costs: (its samples, rows of their trunk, rows each adds); samples nobody trains are left out."""
    needed = needed_rows(batch)
    trunk_of, shared, order = _tree(batch, needed, share)
    found: dict[int, tuple[list[int], int, list[int]]] = {}
    for t, s, i in zip(trunk_of.tolist(), shared.tolist(), order.tolist(), strict=True):
        members, _, own = found.setdefault(t, ([], s, []))
        members.append(i)
        own.append(max(int(needed[i]) - s, 0))
    return list(found.values())


def _tree(batch: Batch, needed: Ints, share: bool) -> tuple[Ints, Ints, Ints]:
    """(trunk number, shared rows, sample) of every sample with rows to compute, siblings together, trunks numbered in order."""
    used = needed.nonzero()[0]
    if not share:
        return np.arange(len(used)), np.zeros(len(used), np.int64), used
    group = batch.group.cpu().numpy()[used]
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    order = used[np.argsort(first[inverse], kind="stable")]
    group = batch.group.cpu().numpy()[order]
    leader = np.ones(len(order), bool)
    leader[1:] = group[1:] != group[:-1]
    number = leader.cumsum() - 1
    heads = leader.nonzero()[0]
    if not len(heads):
        return number, np.zeros(0, np.int64), order
    shortest = np.minimum.reduceat(batch.prompt_lengths.cpu().numpy()[order], heads)
    limit = np.minimum(shortest, np.maximum.reduceat(needed[order], heads))
    limit[np.bincount(number) == 1] = 0
    shared = _agreeing(batch, order, heads, number, limit)[number]
    # A group that shares nothing is as many trunks as it has samples.
    number = (leader | (shared == 0)).cumsum() - 1
    return number, shared, order


def _agreeing(batch: Batch, order: Ints, heads: Ints, number: Ints, limit: Ints) -> Ints:
    """[groups] the length, up to ``limit``, over which tokens and input columns agree between all members."""
    starts = batch.starts.cpu().numpy()
    others = np.setdiff1d(np.arange(len(order)), heads)
    others = others[limit[number[others]] > 0]
    lengths = limit[number[others]]
    a = spans(starts[order[heads[number[others]]]], lengths)
    b = spans(starts[order[others]], lengths)
    agree = limit.copy()
    if not len(a):
        return agree
    differs = np.zeros(len(a), bool)
    for column in (batch.tokens, *(batch.columns[name] for name in sorted(batch.inputs))):
        differs |= _differs(column, a, b)
    at = differs.nonzero()[0]
    np.minimum.at(agree, np.repeat(number[others], lengths)[at], spans(np.zeros_like(lengths), lengths)[at])
    return agree


def _differs(column: Tensor | Ragged, a: Ints, b: Ints) -> NDArray[np.bool_]:
    """[len(a)] whether rows ``a`` and ``b`` of a column are different."""
    if isinstance(column, Ragged):
        column = column.to("cpu")
        left, right = column.select(torch.from_numpy(a)), column.select(torch.from_numpy(b))
        counts = left.offsets.diff()
        unequal = counts != right.offsets.diff()
        same = (~unequal).nonzero().flatten()
        owner = torch.repeat_interleave(same, counts[same])
        unequal[owner[left.select(same).values != right.select(same).values]] = True
        return unequal.numpy()
    rows = column.cpu().numpy()  # numpy, because torch starts all its threads for this little
    one, two = rows.take(a, 0), rows.take(b, 0)
    differs: NDArray[np.bool_] = one != two
    if column.is_floating_point():
        differs &= ~(np.isnan(one) & np.isnan(two))
    return np.logical_or.reduce(differs.reshape(len(a), -1), axis=1, dtype=np.bool_)
