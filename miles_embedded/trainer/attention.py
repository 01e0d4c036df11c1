"""Attention over a packed micro-batch: trunks attend to themselves, branches to their trunk and to themselves.

Segments of similar length share a bucket ([segments, longest]), which bounds the padding and avoids a [rows x rows] mask. A trunk
bucket is plain causal attention. A branch bucket attends to two sets of keys: those of its trunk, gathered once per branch bucket,
and its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_core.data.batch import to_device
from miles_embedded.model.attention import AttentionOptions, ChosenKeys, attend_padded, same_block
from miles_embedded.model.flash import flash_supports
from miles_embedded.model.indexer import Indexed, choose_in_parts
from miles_embedded.model.states import Advance
from miles_embedded.trainer.flash import FlashPlan, flash, flash_gradients
from miles_embedded.trainer.packing import Ints, Packing, Segments
from miles_embedded.trainer.rows import Collect, Spread, group_similar
from miles_embedded.trainer.states import StateGroups


@dataclass
class Bucket:
    """Segments padded to one length.

    Attributes:
        segments: [S] indices of the segments.
        length: the padded length.
        slot: first slot of this bucket in the slots of all buckets.
        trunk_bucket: index of the trunk bucket with the trunks of these branches; -1 for trunks.
        trunk: [S] index of each branch's trunk within that bucket.
        mask: [S or 1, 1, length, trunk length + length] True where a branch attends; None for trunks, whose attention is causal.
    """

    segments: Ints
    length: int
    slot: int
    trunk_bucket: int = -1
    trunk: Tensor | None = None
    mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(segments, padded length)."""
        return len(self.segments), self.length


class Buckets:
    """The segments of a packing in buckets.

    Attributes:
        trunks: trunk buckets.
        branches: branch buckets.
        slots: [slots] row in each slot (an arbitrary row for padding).
        inverse: [rows] slot of each row.
        pads: [n] padding slots.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._narrow: dict[tuple[int, int, bool], list[Tensor]] = {}
        self.trunks, self.branches, slots, pads = _buckets(packing)
        device = packing.rows.device
        self.slots = to_device(torch.from_numpy(slots), device)
        inverse = np.zeros(len(packing.rows), np.int64)
        inverse[slots[~pads]] = (~pads).nonzero()[0]
        self.inverse = to_device(torch.from_numpy(inverse), device)
        self.pads = to_device(torch.from_numpy(pads.nonzero()[0]), device)
        for bucket in self.branches:
            bucket.mask = _make_mask(self, packing, bucket)

    def masks(self, options: AttentionOptions) -> list[Tensor]:
        """Return masks like ``Bucket.mask``, restricted by ``options``: of every trunk bucket, then of every branch bucket."""
        if options.choice is not None and options.hides == (0, 0):
            return options.choice.masks
        key = (*options.hides, options.blocks is not None)  # a packing has the same blocks in all layers
        if key not in self._narrow:
            every = [*self.trunks, *self.branches]
            self._narrow[key] = [_make_mask(self, self._packing, b, options) for b in every]
        masks = self._narrow[key]
        return masks if options.choice is None else [a & b for a, b in zip(masks, options.choice.masks, strict=True)]


class PackedCall:
    """One forward of the model over a packed micro-batch; see ``miles_embedded.model.call.Call``."""

    def __init__(self, ctx: Context, packing: Packing) -> None:
        self.ctx = ctx
        self.packing = packing

    @cached_property
    def buckets(self) -> Buckets:
        """Buckets of the packing, created on first use."""
        return Buckets(self.packing)

    @cached_property
    def _states(self) -> StateGroups:
        return StateGroups(self.packing)

    @cached_property
    def _flash(self) -> FlashPlan:
        return FlashPlan(self.packing)

    @cached_property
    def longest(self) -> int:
        """Largest number of keys of a row, its own included."""
        trunks, branches = self.packing.trunks, self.packing.branches
        whole = trunks.length[branches.trunk] + branches.length
        return int(max(trunks.length.max(initial=0), whole.max(initial=0)))

    @property
    def positions(self) -> Tensor:
        """[rows] index of each row in its sequence."""
        return self.packing.positions

    @property
    def spans(self) -> Ints:
        """See ``Call.spans``; 0 stands for any length with the frequencies of short sequences."""
        spans = self.packing.spans
        return np.zeros(len(self.packing.rows), np.int64) if spans is None else spans

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """See ``Call.attend``."""
        # squeezed, because the gradient of an indexed tensor is a copy into zeros, in another order of the dimensions
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if options is None and query.is_cuda and flash_supports(query):
            return flash(q, k, v, self._flash, scaling).unsqueeze(0)
        return self._attend_buckets(q, k, v, scaling, options).unsqueeze(0)

    def gradients(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scaling: float
    ) -> tuple[Tensor, ...] | None:
        """Compute the gradients of ``attend`` without options from the output of another implementation; None where no kernel does.

        Args:
            grad, out: [1, rows, heads, value dim], the output and its gradient.
            query, key, value, scaling: as for ``attend``.
            sums: [heads, rows] float32, the log of each query's sum of exponentials.

        Returns:
            of query, key and value.
        """
        same = query.shape[3] == value.shape[3] and query.shape[3] % 8 == 0  # others would have to be padded
        if not (same and query.is_cuda and flash_supports(query)):
            return None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        found = flash_gradients(grad[0], q, k, v, out[0], sums, self._flash, scaling)
        return tuple(x.transpose(0, 1)[None] for x in found)

    def _attend_buckets(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: AttentionOptions | None
    ) -> Tensor:
        """Attend q [rows, heads, dim] to k and v [rows, kv heads, dim], bucket by bucket; returns [rows, heads, value dim]."""
        heads, width, gqa, buckets = q.shape[1], v.shape[2], q.shape[1] != k.shape[1], self.buckets
        index = (buckets.slots, buckets.inverse, buckets.pads)
        q, k, v = (Spread.apply(x, *index) for x in (q, k, v))
        every = [*buckets.trunks, *buckets.branches]
        masks = [b.mask for b in every] if options is None else buckets.masks(options)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for bucket, mask in zip(every, masks, strict=True):
            k_b, v_b = _take(k, bucket), _take(v, bucket)
            keys.append(k_b)
            values.append(v_b)
            if bucket.trunk is not None:
                k_b = torch.cat([keys[bucket.trunk_bucket].index_select(0, bucket.trunk), k_b], 2)
                v_b = torch.cat([values[bucket.trunk_bucket].index_select(0, bucket.trunk), v_b], 2)
            outputs.append(attend_padded(_take(q, bucket), k_b, v_b, mask, scaling, gqa, options))
        flat = torch.cat([o.transpose(1, 2).reshape(-1, heads, width) for o in outputs])
        return Collect.apply(flat, *index)

    def advance(self, module: nn.Module, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``."""
        return self._states.advance(module, hidden, compute)

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """See ``Call.choose``."""
        if self.longest <= indexed.most:
            return ChosenKeys()
        buckets = self.buckets
        flat = indexed.map(torch.index_select, 0, buckets.slots)
        keys: list[Tensor] = []
        masks = []
        for bucket in [*buckets.trunks, *buckets.branches]:
            before = None if bucket.trunk is None else keys[bucket.trunk_bucket].index_select(0, bucket.trunk)
            seen = _make_mask(self.buckets, self.packing, bucket) if bucket.mask is None else bucket.mask
            mask, own = choose_in_parts(flat.map(_segments, bucket), before, seen[:, 0])
            keys.append(own)
            masks.append(mask.unsqueeze(1))
        return ChosenKeys(masks)


def _take(x: Tensor, bucket: Bucket) -> Tensor:
    """Select a bucket: [slots, heads, dim] -> [segments, heads, length, dim]."""
    return _segments(x, bucket).transpose(1, 2)


def _segments(x: Tensor, bucket: Bucket) -> Tensor:
    """Select a bucket: [slots, ...] -> [segments, length, ...]."""
    s, length = bucket.shape
    return x[bucket.slot : bucket.slot + s * length].view(s, length, *x.shape[1:])


def _buckets(packing: Packing) -> tuple[list[Bucket], list[Bucket], Ints, np.ndarray]:
    """Return trunk buckets, branch buckets, the row in each slot and which slots are padding."""
    slots: list[Ints] = []
    pads: list[np.ndarray] = []
    size = 0

    def make(segments: Segments, chosen: Ints) -> Bucket:
        nonlocal size
        lengths = segments.length[chosen]
        bucket = Bucket(chosen, int(lengths.max()), size)
        within = np.arange(bucket.length)
        padded = within >= lengths[:, None]
        slots.append(
            np.where(padded, segments.start[chosen][:, None], segments.start[chosen][:, None] + within).ravel()
        )
        pads.append(padded.ravel())
        size += len(chosen) * bucket.length
        return bucket

    trunks = [make(packing.trunks, chosen) for chosen in group_similar(packing.trunks.length)]
    where = np.zeros(len(packing.trunks), np.int64)
    within = np.zeros(len(packing.trunks), np.int64)
    for i, bucket in enumerate(trunks):
        where[bucket.segments] = i
        within[bucket.segments] = np.arange(len(bucket.segments))
    branches = []
    home = where[packing.branches.trunk]
    for i in np.unique(home):
        members = (home == i).nonzero()[0]
        for similar in group_similar(packing.branches.length[members]):
            bucket = make(packing.branches, members[similar])
            bucket.trunk_bucket = int(i)
            trunk = torch.from_numpy(within[packing.branches.trunk[bucket.segments]])
            bucket.trunk = to_device(trunk, packing.rows.device)
            branches.append(bucket)
    return trunks, branches, np.concatenate(slots), np.concatenate(pads)


def _make_mask(buckets: Buckets, packing: Packing, bucket: Bucket, options: AttentionOptions | None = None) -> Tensor:
    """Compute ``Bucket.mask``, restricted by ``AttentionOptions.sees``."""
    options = options or AttentionOptions()
    row = torch.arange(bucket.length, device=packing.rows.device)
    if bucket.trunk is None:
        mask = options.sees(row[:, None], row, _find_together(buckets, bucket, options.blocks))
        return mask.view(-1, 1, bucket.length, bucket.length)
    home = buckets.trunks[bucket.trunk_bucket]
    lengths = packing.trunks.length[packing.branches.trunk[bucket.segments]]
    if (lengths == home.length).all():
        lengths = lengths[:1]  # one mask for all segments
    ends = to_device(torch.from_numpy(lengths), row.device)[:, None, None]
    query, column = ends + row[:, None], torch.arange(home.length, device=row.device)
    seen = options.sees(query, column) & (column < ends)
    own = options.sees(query, ends + row, _find_together(buckets, bucket, options.blocks))
    count = max(len(seen), len(own))  # 1 for one mask for all segments
    return torch.cat([seen.expand(count, -1, -1), own.expand(count, -1, -1)], 2).unsqueeze(1)


def _find_together(buckets: Buckets, bucket: Bucket, blocks: Tensor | None) -> Tensor | None:
    """[segments, length, length] whether two rows of a segment are in one block; None without blocks. A block is in one segment (``pack``)."""
    if blocks is None:
        return None
    own = _segments(blocks[buckets.slots].index_fill(0, buckets.pads, -1), bucket)
    return same_block(own[:, :, None], own[:, None])
