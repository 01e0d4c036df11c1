"""Attention over a packed micro-batch: trunks attend to themselves, branches to their trunk and to themselves.

Segments of similar length are put side by side in a bucket ([segments, longest]), so padding is bounded and no
[rows x rows] mask ever exists. A trunk bucket is plain causal attention. A branch bucket attends to two sets of keys: those
of its trunk, which are gathered once a trunk, and its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from miles_core.contracts.trainer import Context
from miles_embedded.cpu import operations
from miles_embedded.cpu.install import compiled
from miles_embedded.model.indexer import Indexed, chosen
from miles_embedded.model.sight import Choice, Sight, causal, with_sinks
from miles_embedded.trainer.flash import FlashPlan, flash, takes
from miles_embedded.trainer.packing import Ints, Packing, Segments

#: A bucket's shortest segment is at least this part of its longest (or within _SLACK rows of it).
_FILL = 0.75
_SLACK = 16
#: Up to this many keys a CPU is faster with plain products.
_SHORT = 64
#: Up to this many keys a CPU is faster with a compiled loop over rows than with products (benchmarks/cpu_kernels.py).
_COMPILED = 128


@dataclass
class Bucket:
    """Segments padded to one length.

    Attributes:
        segments: [S] which segments.
        length: the padded length.
        slot: first slot of this bucket in the slot order of all buckets.
        trunk_bucket: the trunk bucket that holds the trunks of these branches; -1 for trunks.
        trunk: [S] index of each branch's trunk within that bucket.
        mask: [S or 1, 1, length, trunk length + length] True where a branch may look; None for trunks, which look at
            everything up to themselves.
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
    """A packing's segments in buckets.

    Attributes:
        trunks: trunk buckets.
        branches: branch buckets.
        slots: [slots] the row in each slot (any row where it is padding).
        inverse: [rows] the slot of each row.
        pads: [n] slots that are padding.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._windows: dict[int, list[Tensor]] = {}
        self.trunks, self.branches, slots, pads = _buckets(packing)
        device = packing.rows.device
        self.slots = torch.from_numpy(slots).to(device)
        inverse = np.zeros(len(packing.rows), np.int64)
        inverse[slots[~pads]] = (~pads).nonzero()[0]
        self.inverse = torch.from_numpy(inverse).to(device)
        self.pads = torch.from_numpy(pads.nonzero()[0]).to(device)
        for bucket in self.branches:
            bucket.mask = _mask(self, packing, bucket)

    def masks(self, sight: Sight) -> list[Tensor]:
        """Where rows may look, like ``Bucket.mask``: of every trunk bucket, then of every branch bucket."""
        if sight.choice is not None and not sight.window:
            return sight.choice.masks
        if sight.window not in self._windows:
            every = [*self.trunks, *self.branches]
            self._windows[sight.window] = [_mask(self, self._packing, b, sight.window) for b in every]
        masks = self._windows[sight.window]
        return masks if sight.choice is None else [a & b for a, b in zip(masks, sight.choice.masks, strict=True)]


class PackedCall:
    """One forward of the model over a packed micro-batch; see ``miles_embedded.model.call.Call``."""

    def __init__(self, ctx: Context, packing: Packing) -> None:
        self.ctx = ctx
        self.packing = packing

    @cached_property
    def buckets(self) -> Buckets:
        """Made when the first layer asks."""
        return Buckets(self.packing)

    @cached_property
    def _flash(self) -> FlashPlan:
        return FlashPlan(self.packing)

    @cached_property
    def _segments(self) -> operations.Tree:
        """Trunks, each followed by its branches."""
        trunks, branches = self.packing.trunks, self.packing.branches
        far = np.stack([trunks.start, trunks.length], 1)
        alone = np.concatenate([np.zeros_like(far), far], 1)
        grown = np.concatenate([far[branches.trunk], np.stack([branches.start, branches.length], 1)], 1)
        family = np.concatenate([np.arange(len(trunks)), branches.trunk])
        order = np.argsort(family, kind="stable")
        first = np.searchsorted(family[order], np.arange(len(trunks) + 1))
        segments = np.concatenate([alone, grown])[order]
        return operations.Tree(torch.from_numpy(segments), torch.from_numpy(first))

    @cached_property
    def longest(self) -> int:
        """The most keys that a row has, itself included."""
        trunks, branches = self.packing.trunks, self.packing.branches
        whole = trunks.length[branches.trunk] + branches.length
        return int(max(trunks.length.max(initial=0), whole.max(initial=0)))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight | None = None
    ) -> Tensor:
        """See ``Call.attend``."""
        if sight is not None:
            sight = sight.within(self.longest)
        if sight is None and takes(query):
            return flash(*(x[0].transpose(0, 1) for x in (query, key, value)), self._flash, scaling).unsqueeze(0)
        if sight is None and self.longest <= _COMPILED and compiled(module, query, key, value):
            rows = (x[0].transpose(0, 1) for x in (query, key, value))
            return operations.tree_attention(*rows, self._segments, scaling).unsqueeze(0)
        width, layout = value.shape[-1], self.buckets
        index = (layout.slots, layout.inverse, layout.pads)
        q, k, v = (Spread.apply(x[0].transpose(0, 1), *index) for x in (query, key, value))
        every = [*layout.trunks, *layout.branches]
        masks = [b.mask for b in every] if sight is None else layout.masks(sight)
        sinks = None if sight is None else sight.sinks
        gqa = query.shape[1] != key.shape[1]
        keys, values, outputs = [], [], []
        for bucket, mask in zip(every, masks, strict=True):
            k_b, v_b = _take(k, bucket), _take(v, bucket)
            keys.append(k_b)
            values.append(v_b)
            if bucket.trunk is not None:
                k_b = torch.cat([keys[bucket.trunk_bucket].index_select(0, bucket.trunk), k_b], 2)
                v_b = torch.cat([values[bucket.trunk_bucket].index_select(0, bucket.trunk), v_b], 2)
            outputs.append(attend_padded(_take(q, bucket), k_b, v_b, mask, scaling, gqa, sinks))
        flat = torch.cat([o.transpose(1, 2).reshape(-1, query.shape[1], width) for o in outputs])
        return Collect.apply(flat, *index).unsqueeze(0)

    def choose(self, indexed: Indexed) -> Choice:
        """See ``Call.choose``."""
        if self.longest <= indexed.most:
            return Choice()
        layout = self.buckets
        flat = indexed.map(torch.index_select, 0, layout.slots)
        keys, masks = [], []
        for bucket in [*layout.trunks, *layout.branches]:
            before = None if bucket.trunk is None else keys[bucket.trunk_bucket].index_select(0, bucket.trunk)
            seen = _mask(self.buckets, self.packing, bucket) if bucket.mask is None else bucket.mask
            mask, own = chosen(flat.map(_segments, bucket), before, seen[:, 0])
            keys.append(own)
            masks.append(mask.unsqueeze(1))
        return Choice(masks)


def _take(x: Tensor, bucket: Bucket) -> Tensor:
    """[slots, heads, dim] -> [segments, heads, length, dim] of one bucket."""
    return _segments(x, bucket).transpose(1, 2)


def _segments(x: Tensor, bucket: Bucket) -> Tensor:
    """[slots, ...] -> [segments, length, ...] of one bucket."""
    s, length = bucket.shape
    return x[bucket.slot : bucket.slot + s * length].view(s, length, *x.shape[1:])


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, gqa: bool, sinks: Tensor | None = None
) -> Tensor:
    """q [segments, heads, length, dim], k and v [segments, kv heads, keys, dim]; causal without a mask. ``sinks``: see ``Sight``."""
    if sinks is not None:
        if mask is None:
            mask = causal(q.shape[2], k.shape[2], 0, q.device)[None, None]
        q, k, v, mask = with_sinks(q, k, v, mask, sinks, scaling)
    if k.shape[2] <= _SHORT and q.device.type == "cpu":
        return ShortAttention.apply(q, k, v, mask, scaling)
    # The fused kernels want keys and values of one width (DeepSeek-V3 has 192 and 128).
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = pad(v, (0, k.shape[-1] - width))
    if gqa and q.is_cuda:
        # The memory-efficient kernel, the one that takes masks and float32, does not know shared heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        gqa = False
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
    return out[..., :width]


class ShortAttention(torch.autograd.Function):
    """Attention over few keys as plain batched products: for tens of keys the fused CPU kernel's blocks are mostly empty and
    its backward takes twice as long. Query heads that share keys are rows of one product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        segments, kv_heads, keys, _ = k.shape
        length = q.shape[2]
        batch = segments * kv_heads
        if mask is None:
            mask = torch.ones(1, 1, length, keys, dtype=torch.bool, device=q.device).tril()
        q, k, v = (x.reshape(batch, -1, x.shape[3]) for x in (q, k, v))
        hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        scores = torch.bmm(q, k.transpose(1, 2)).view(segments, -1, length, keys)
        weights = scores.mul_(scaling).add_(hidden).softmax(-1, dtype=_at_least_float32(q.dtype)).to(q.dtype)
        weights = weights.view(batch, -1, keys)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scaling, ctx.shape = scaling, (segments, -1, length)
        return torch.bmm(weights, v).view(segments, -1, length, v.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grads[0].reshape(len(q), -1, v.shape[2])
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        wide = _at_least_float32(q.dtype)
        inner = torch._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)).to(wide), weights.to(wide), -1, wide)
        inner = inner.mul_(ctx.scaling).to(q.dtype)
        grad_q, grad_k = torch.bmm(inner, k), torch.bmm(inner.transpose(1, 2), q)
        segments, _, length = ctx.shape
        return (
            grad_q.view(segments, -1, length, q.shape[2]),
            grad_k.view(segments, -1, *grad_k.shape[1:]),
            grad_v.view(segments, -1, *grad_v.shape[1:]),
            None,
            None,
        )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Spread(torch.autograd.Function):
    """Rows into slots: [rows, ...] -> [slots, ...]. Every row has one slot, so the backward is a gather as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, inverse: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None, None


class Collect(torch.autograd.Function):
    """Slots back into rows: [slots, ...] -> [rows, ...]; padding slots get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, inverse: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(slots, pads)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slots, pads = ctx.saved_tensors
        grad = grads[0].index_select(0, slots)
        if len(pads):
            grad.index_fill_(0, pads, 0.0)
        return grad, None, None, None


def _buckets(packing: Packing) -> tuple[list[Bucket], list[Bucket], Ints, np.ndarray]:
    """Trunk buckets, branch buckets, the row in each slot and which slots are padding."""
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

    trunks = [make(packing.trunks, chosen) for chosen in _similar(packing.trunks.length)]
    where = np.zeros(len(packing.trunks), np.int64)
    within = np.zeros(len(packing.trunks), np.int64)
    for i, bucket in enumerate(trunks):
        where[bucket.segments] = i
        within[bucket.segments] = np.arange(len(bucket.segments))
    branches = []
    home = where[packing.branches.trunk]
    for i in np.unique(home):
        members = (home == i).nonzero()[0]
        for similar in _similar(packing.branches.length[members]):
            bucket = make(packing.branches, members[similar])
            bucket.trunk_bucket = int(i)
            bucket.trunk = torch.from_numpy(within[packing.branches.trunk[bucket.segments]]).to(packing.rows.device)
            branches.append(bucket)
    return trunks, branches, np.concatenate(slots), np.concatenate(pads)


def _similar(lengths: Ints) -> list[Ints]:
    """Indices by similar length, longest first; order is kept within a bucket."""
    order = np.argsort(-lengths, kind="stable")
    found: list[Ints] = []
    while len(order):
        longest = lengths[order[0]]
        same = lengths[order] >= min(_FILL * longest, longest - _SLACK)
        found.append(np.sort(order[same]))
        order = order[~same]
    return found


def _mask(layout: Buckets, packing: Packing, bucket: Bucket, window: int = 0) -> Tensor:
    """See ``Bucket.mask``; ``window`` as in ``Sight``."""
    device = packing.rows.device
    own = causal(bucket.length, bucket.length, window, device)
    if bucket.trunk is None:
        return own[None, None]
    home = layout.trunks[bucket.trunk_bucket]
    lengths = packing.trunks.length[packing.branches.trunk[bucket.segments]]
    if (lengths == home.length).all():
        lengths = lengths[:1]  # one mask for all
    ends = torch.from_numpy(lengths).to(device)[:, None, None]
    column = torch.arange(home.length, device=device)
    seen = (column < ends).expand(-1, bucket.length, -1)
    if window:
        seen = seen & (column > ends + torch.arange(bucket.length, device=device)[:, None] - window)
    return torch.cat([seen, own.expand(len(lengths), -1, -1)], 2).unsqueeze(1)
