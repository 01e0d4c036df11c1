"""Attention over a packed micro-batch: trunks attend to themselves, branches to their trunk and to themselves.

Segments of similar length are put side by side in a bucket ([segments, longest]), so padding is bounded and no
[rows x rows] mask ever exists. A trunk bucket is plain causal attention. A branch bucket attends to two sets of keys: those
of its trunk, which are gathered once a trunk, and its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from miles_core.embedded.packing import Ints, Packing, Segments
from miles_core.train.trainer import Context

#: A bucket's shortest segment is at least this part of its longest (or within _SLACK rows of it).
_FILL = 0.75
_SLACK = 16


@dataclass
class Bucket:
    """Segments padded to one length.

    Attributes:
        segments: [S] which segments.
        length: the padded length.
        slot: first slot of this bucket in the slot order of all buckets.
        trunk_bucket: the trunk bucket that holds the trunks of these branches; -1 for trunks.
        trunk: [S] index of each branch's trunk within that bucket.
        mask: [S or 1, 1, length, trunk length + length] True where a branch may look; None for trunks.
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


class PackedCall:
    """One forward of the model over a packed micro-batch; see ``miles_core.embedded.call.Call``."""

    def __init__(self, ctx: Context, packing: Packing) -> None:
        self.ctx = ctx
        self.trunks, self.branches, slots, pads = _buckets(packing)
        device = packing.rows.device
        #: [slots] the row in each slot (any row where ``pads``), and [rows] the slot of each row.
        self.slots = torch.from_numpy(slots).to(device)
        inverse = np.zeros(len(packing.rows), np.int64)
        inverse[slots[~pads]] = (~pads).nonzero()[0]
        self.inverse = torch.from_numpy(inverse).to(device)
        self.pads = torch.from_numpy(pads.nonzero()[0]).to(device)
        _masks(self, packing, device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See ``Call.attend``."""
        width = value.shape[-1]
        q, k, v = (Spread.apply(x[0].transpose(0, 1), self.slots, self.inverse, self.pads) for x in (query, key, value))
        gqa = query.shape[1] != key.shape[1]
        keys, values, outputs = [], [], []
        for bucket in self.trunks:
            k_b, v_b = _take(k, bucket), _take(v, bucket)
            keys.append(k_b)
            values.append(v_b)
            outputs.append(_attend(_take(q, bucket), k_b, v_b, None, scaling, gqa))
        for bucket in self.branches:
            k_b = torch.cat([keys[bucket.trunk_bucket].index_select(0, bucket.trunk), _take(k, bucket)], 2)
            v_b = torch.cat([values[bucket.trunk_bucket].index_select(0, bucket.trunk), _take(v, bucket)], 2)
            outputs.append(_attend(_take(q, bucket), k_b, v_b, bucket.mask, scaling, gqa))
        flat = torch.cat([o.transpose(1, 2).reshape(-1, query.shape[1], width) for o in outputs])
        return Collect.apply(flat, self.slots, self.inverse, self.pads).unsqueeze(0)


def _take(x: Tensor, bucket: Bucket) -> Tensor:
    """[slots, heads, dim] -> [segments, heads, length, dim] of one bucket."""
    s, length = bucket.shape
    return x[bucket.slot : bucket.slot + s * length].view(s, length, *x.shape[1:]).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, gqa: bool) -> Tensor:
    # The fused kernels want keys and values of one width (DeepSeek-V3 has 192 and 128).
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = pad(v, (0, k.shape[-1] - width))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
    return out[..., :width]


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
        for chosen in _similar(packing.branches.length[members]):
            bucket = make(packing.branches, members[chosen])
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


def _masks(call: PackedCall, packing: Packing, device: torch.device) -> None:
    for bucket in call.branches:
        home = call.trunks[bucket.trunk_bucket]
        lengths = packing.trunks.length[packing.branches.trunk[bucket.segments]]
        if (lengths == home.length).all():
            lengths = lengths[:1]  # one mask for all
        own = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=device).tril()
        seen = torch.arange(home.length, device=device) < torch.from_numpy(lengths).to(device)[:, None]
        bucket.mask = torch.cat(
            [
                seen[:, None, :].expand(-1, bucket.length, -1),
                own.expand(len(lengths), -1, -1),
            ],
            2,
        ).unsqueeze(1)
