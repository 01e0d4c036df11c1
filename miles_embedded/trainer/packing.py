"""Micro-batches of an optimizer step, and the layout of each: one row of tokens without padding, in which the shared prompt of a group is
computed once.

The samples of a group start with the same tokens. This shared part (the *trunk*) is computed once, and every sample continues it with a
*branch* that attends to the trunk and itself; a sample that shares nothing is a trunk only. Linear layers, norms and experts thus
process each distinct token once, and only attention depends on the tree.

Two conditions limit the trunk. If an input column (``Batch.inputs``, e.g. replayed expert choices) differs between siblings, their rows
differ even for equal tokens, so the trunk ends at the first such row, for any kind of column. Rows that no trained position needs, such
as the last token of every sample, are not computed.

Samples longer than the length at which rotary frequencies change (``model.growing_rope``) are laid out once per set of frequencies. Tokens
up to the switch were predicted with the short set; later ones with the long set for the whole sequence. Such a sample is therefore
packed twice: its beginning, trained up to the switch, and the whole sample, trained after it. The two copies share no row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_core.data.batch import Batch, Ragged

Ints = NDArray[np.int64]


#: Largest share of rows that may be computed twice to need fewer micro-batches.
_TWICE = 1 / 16


@dataclass
class Segments:
    """Ranges of consecutive physical rows: start, length, and (for branches) the index of the trunk."""

    start: Ints
    length: Ints
    trunk: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Packing:
    """Physical layout of a micro-batch of T flat tokens in R rows.

    Attributes:
        rows: [R] index of each physical row in the flat columns.
        positions: [R] position of each row within its sample.
        row_of: [T] physical row that computes a flat token; -1 if the token's sample does not need it.
        trunks: segments with causal attention to themselves.
        branches: segments that attend to their trunk and themselves; siblings are adjacent.
        sources: [M] physical row whose output predicts each target.
        targets: [M] flat index of each target (``loss_mask`` is not 0), ascending.
        spans: [R] sequence length that determines each row's rotary frequencies; None if all samples use the same set.
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
    """Compute the layout of ``batch``. ``share=False`` computes every sample separately."""
    device = batch.tokens.device
    starts = batch.starts.cpu().numpy()
    targets = target_positions(batch)
    needed = needed_rows(batch, targets)
    trunk_of, shared, order = _build_tree(batch, needed, share)
    own = needed[order] - shared  # rows of each branch, or of a trunk without branches
    if not len(order):  # nothing is trained, but a model needs at least one row
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
    """Concatenate ``range(start[i], start[i] + length[i])`` for all i."""
    end = length.cumsum()
    within = np.arange(end[-1] if len(end) else 0) - np.repeat(end - length, length)
    return np.repeat(start, length) + within


def target_positions(batch: Batch) -> Ints:
    """Return [M] flat indices of the tokens with a loss mask. ValueError if one is the first token of its sample."""
    targets = batch.mask.cpu().numpy().nonzero()[0]
    first = np.zeros(len(batch.tokens) + 1, bool)
    first[batch.starts.cpu().numpy()] = True
    if first[targets].any():
        raise ValueError("loss_mask is 1 on the first token of a sample, which cannot be predicted")
    return targets


def needed_rows(batch: Batch, targets: Ints | None = None) -> Ints:
    """Return [N] number of leading tokens of each sample that must be inputs: up to the token before its last target."""
    targets = target_positions(batch) if targets is None else targets
    starts, lengths = batch.starts.cpu().numpy(), batch.lengths.cpu().numpy()
    owner = np.repeat(np.arange(len(batch)), lengths)[targets]
    needed = np.zeros(len(batch), np.int64)
    np.maximum.at(needed, owner, targets - starts[owner])
    return needed


def _list_groups(needed: Ints, trunk_of: Ints, shared: Ints, order: Ints) -> list[tuple[list[int], int, list[int]]]:
    """Return the cost of each group: (samples, rows of the trunk, additional rows per sample), without samples that train nothing.

    Args:
        needed: as of ``needed_rows``.
        trunk_of, shared, order: the results of ``_build_tree``.
    """
    found: dict[int, tuple[list[int], int, list[int]]] = {}
    for t, s, i in zip(trunk_of.tolist(), shared.tolist(), order.tolist(), strict=True):
        members, _, own = found.setdefault(t, ([], s, []))
        members.append(i)
        own.append(max(int(needed[i]) - s, 0))
    return list(found.values())


def _build_tree(batch: Batch, needed: Ints, share: bool) -> tuple[Ints, Ints, Ints]:
    """Return (trunk index, shared rows, sample) of every sample with rows to compute, siblings adjacent, in trunk order."""
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
    if batch.media:  # equal placeholders of different images are different inputs
        media = [batch.media[i] for i in order]
        differs = [own != media[heads[n]] for own, n in zip(media, number, strict=True)]
        limit[np.unique(number[differs])] = 0
    shared = _find_agreement(batch, order, heads, number, limit)[number]
    # Each sample of a group without shared rows is a separate trunk.
    number = (leader | (shared == 0)).cumsum() - 1
    return number, shared, order


def _find_agreement(batch: Batch, order: Ints, heads: Ints, number: Ints, limit: Ints) -> Ints:
    """Return [groups] length, up to ``limit``, over which tokens and input columns are equal for all members."""
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
    """Return [len(a)] whether rows ``a`` and ``b`` of a column differ."""
    if isinstance(column, Ragged):
        column = column.to("cpu")
        left, right = column.select(torch.from_numpy(a)), column.select(torch.from_numpy(b))
        counts = left.offsets.diff()
        unequal = counts != right.offsets.diff()
        same = (~unequal).nonzero().flatten()
        owner = torch.repeat_interleave(same, counts[same])
        unequal[owner[left.select(same).values != right.select(same).values]] = True
        return unequal.numpy()
    rows = column.cpu().numpy()  # numpy, because torch would start all its threads for a small array
    if rows.ndim > 1 and not column.is_floating_point() and rows.flags.c_contiguous and rows[:1].nbytes % 8 == 0:
        rows = rows.reshape(len(rows), -1).view(np.int64)  # several small integers at once
    one, two = rows.take(a, 0), rows.take(b, 0)
    differs: NDArray[np.bool_] = one != two
    if column.is_floating_point():
        differs &= ~(np.isnan(one) & np.isnan(two))
    return np.logical_or.reduce(differs.reshape(len(a), -1), axis=1, dtype=np.bool_)


def pack_grown(batch: Batch, share: bool, switch: int) -> Packing:
    """Pack a batch like ``pack`` for a model whose frequencies change after ``switch`` tokens; 0 if they do not change."""
    grown = np.flatnonzero(needed_rows(batch) > switch) if switch else np.zeros(0, np.int64)
    if not len(grown):
        return pack(batch, share)
    tokens, device = len(batch.tokens), batch.tokens.device
    twice = batch.select([*range(len(batch)), *grown.tolist()])
    origin = torch.cat([torch.arange(tokens, device=device), _find_tokens(batch, grown)])
    second = torch.arange(len(twice.tokens), device=device) >= tokens
    within = torch.arange(len(twice.tokens), device=device) - twice.starts[twice.owner]
    beginning = torch.zeros(len(twice), dtype=torch.bool, device=device)
    beginning[torch.from_numpy(grown).to(device)] = True
    outside = torch.where(second, within <= switch, beginning[twice.owner] & (within > switch))
    group = twice.group.clone()
    group[len(batch) :] += int(batch.group.max()) + 1
    mask = twice.mask.masked_fill(outside, 0)
    packing = pack(replace(twice, group=group, columns=twice.columns | {"loss_mask": mask}), share)
    targets = origin[packing.targets]
    order = targets.argsort()
    # a token in both copies refers to the copy of the whole sample
    row_of = packing.row_of[:tokens].clone()
    again = packing.row_of[tokens:]
    row_of[origin[tokens:][again >= 0]] = again[again >= 0]
    return replace(
        packing,
        rows=origin[packing.rows],
        row_of=row_of,
        sources=packing.sources[order],
        targets=targets[order],
        spans=np.where((packing.rows >= tokens).cpu().numpy(), switch + 1, switch),
    )


def _find_tokens(batch: Batch, samples: np.ndarray) -> Tensor:
    """Return the flat indices of these samples' tokens."""
    return torch.cat(
        [
            torch.arange(int(n), device=s.device) + s
            for s, n in zip(batch.starts[samples], batch.lengths[samples], strict=True)
        ]
    )


def split(
    batch: Batch, micro_batch_size: int | None = None, max_tokens: int | None = None, share: bool = True
) -> list[list[int]]:
    """Return the sample indices of each micro-batch; every sample is in exactly one.

    Args:
        batch: all samples of the step.
        micro_batch_size: samples per micro-batch, in order; None for no limit.
        max_tokens: if given, computed tokens per micro-batch, instead of ``micro_batch_size``. A group is kept together if it fits, so
            that its prompt is computed once, unless dividing groups needs fewer micro-batches and few more rows; a sample longer than
            the limit has its own micro-batch.
        share: whether prompts are shared, which determines the cost of a sample.
    """
    everything = list(range(len(batch)))
    if max_tokens is None:
        size = micro_batch_size or max(len(batch), 1)
        return [everything[i : i + size] for i in range(0, len(batch), size)]
    needed = needed_rows(batch)
    trunk_of, shared, order = _build_tree(batch, needed, share)
    trunks = shared[np.unique(trunk_of, return_index=True)[1]]
    if trunks.sum() + np.maximum(needed[order] - shared, 0).sum() <= max_tokens:  # as the rest would find
        found = [np.sort(order).tolist()] if len(order) else []
    else:
        groups = _list_groups(needed, trunk_of, shared, order)
        found = _fill([piece for group in groups for piece in _pieces(*group, max_tokens)], max_tokens)
        found = _divide_groups(groups, max_tokens, len(found)) or found
    idle = sorted(set(everything) - {i for samples in found for i in samples})
    if idle:  # samples that train nothing cost nothing, but callers expect results for them
        found = [[*found[0], *idle], *found[1:]] if found else [idle]
    return found


def idle_sample(batch: Batch) -> Batch:
    """Return a sample with every column of ``batch`` that trains nothing: the first sample, or two zero tokens if there is none."""
    if len(batch):
        one = batch.select([0])
        return replace(one, columns=one.columns | {"loss_mask": torch.zeros_like(one.mask)})

    def rows(column: Tensor | Ragged) -> Tensor | Ragged:
        if isinstance(column, Ragged):
            return Ragged(column.values, column.offsets.new_zeros(3))
        return column.new_zeros(2, *column.shape[1:])

    number = batch.lengths.new_zeros(1)
    return replace(
        batch,
        tokens=batch.tokens.new_zeros(2),
        lengths=number + 2,
        prompt_lengths=number + 1,
        group=number,
        rollout=number,
        index=number,
        columns={name: rows(column) for name, column in batch.columns.items()},
        scalars={name: value.new_zeros(1, *value.shape[1:]) for name, value in batch.scalars.items()},
    )


def _pieces(members: list[int], trunk: int, own: list[int], limit: int) -> list[tuple[int, list[int]]]:
    """Split a group into parts of at most ``limit`` rows, each including the trunk: (rows, samples)."""
    pieces: list[tuple[int, list[int]]] = []
    for sample, rows in zip(members, own, strict=True):
        if pieces and pieces[-1][0] + rows <= limit:
            cost, samples = pieces[-1]
            pieces[-1] = (cost + rows, [*samples, sample])
        else:
            pieces.append((trunk + rows, [sample]))
    return pieces


def _divide_groups(groups: list[tuple[list[int], int, list[int]]], limit: int, whole: int) -> list[list[int]]:
    """Assign samples to fewer than ``whole`` micro-batches of similar size, in order, where a group may be in two of them; [] if that is not
    possible, or if computing prompts twice would add more than ``_TWICE`` of the rows."""
    found = _fill_in_order(groups, limit)
    rows = sum(trunk + sum(own) for _, trunk, own in groups)
    if len(found) >= whole or sum(used for used, _ in found) > rows * (1 + _TWICE):
        return []
    similar = _fill_in_order(groups, limit, len(found))
    return [sorted(samples) for _, samples in (similar if len(similar) == len(found) else found)]


def _fill_in_order(
    groups: list[tuple[list[int], int, list[int]]], limit: int, count: int = 0
) -> list[tuple[int, list[int]]]:
    """Fill one micro-batch after the other with samples, up to ``limit`` rows or, with ``count``, to an equal share of the rows that are left;
    returns (rows, samples) of each. Each micro-batch computes the prompts of its samples."""
    bins: list[tuple[int, list[int]]] = [(0, [])]
    left = sum(trunk + sum(own) for _, trunk, own in groups)
    share = left / count if count else limit
    for members, trunk, own in groups:
        here = 0  # the number of the micro-batch that has this group's prompt
        for sample, rows in zip(members, own, strict=True):
            used, held = bins[-1]
            cost = rows + (0 if here == len(bins) else trunk)
            if held and (used >= share or used + cost > limit):
                left -= used
                share = left / max(count - len(bins), 1) if count else limit
                bins.append((trunk + rows, [sample]))
            else:
                bins[-1] = used + cost, [*held, sample]
            here = len(bins)
    return bins


def _fill(pieces: list[tuple[int, list[int]]], limit: int) -> list[list[int]]:
    """Assign pieces to few micro-batches; samples stay in order within each."""
    ordered = sorted(pieces, key=lambda p: (-p[0], p[1][0]))
    found = _fill_first(ordered, limit)
    return _fill_evenly(ordered, limit, len(found)) or found


def _fill_evenly(ordered: list[tuple[int, list[int]]], limit: int, count: int) -> list[list[int]]:
    """Assign each piece to the smallest of ``count`` micro-batches; [] if one gets too large. Every micro-batch takes the host the same time,
    during which a GPU would wait in a small one, and the largest determines the memory."""
    bins: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
    for cost, samples in ordered:
        i = min(range(count), key=lambda i: bins[i][0])
        used, held = bins[i]
        if used and used + cost > limit:
            return []
        bins[i] = used + cost, held + samples
    return [sorted(samples) for _, samples in bins]


def _fill_first(ordered: list[tuple[int, list[int]]], limit: int) -> list[list[int]]:
    """Assign each piece to the first micro-batch that it fits into."""
    bins: list[tuple[int, list[int]]] = []
    for cost, samples in ordered:
        for i, (used, held) in enumerate(bins):
            if used + cost <= limit:
                held += samples
                bins[i] = used + cost, held
                break
        else:
            bins.append((cost, list(samples)))
    return [sorted(samples) for _, samples in bins]
