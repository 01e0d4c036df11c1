"""How rows attend: to a packed prompt, and to a shared prompt plus their own tokens.

Decoding attends to the two stores of the cache in two parts and joins the partial softmaxes exactly (the running
maximum and sum of Milakov and Gimelshein 2018, as FlashAttention does between blocks). The rows of a group are
stacked as queries against one copy of their prompt, so its keys and values are read once a group instead of once a row.
Scores, maxima and sums are float32 whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.embedded.cache import Cache, to_device
from miles_core.train.trainer import Context

_NEVER = -1e30  # finite: a fully masked padding query must not become NaN


class PromptCall:
    """Whole sequences, packed without padding: [1, sum of lengths] tokens; each token sees its own sequence up to
    itself.

    Only attention pads, inside this call, to the longest of the sequences. ``slots`` are where the cache keeps the
    keys and values, or None to keep nothing (scoring).
    """

    def __init__(
        self, ctx: Context, lengths: Sequence[int], cache: Cache | None = None, slots: np.ndarray | None = None
    ) -> None:
        self.ctx, self.cache, self.slots = ctx, cache, slots
        self.count, self.longest = len(lengths), max(lengths)
        self.even = min(lengths) == self.longest
        if not self.even:
            size = np.asarray(lengths, np.int64)
            start = size.cumsum() - size
            column = np.arange(self.longest)
            inside = column < size[:, None]
            device = ctx.rows.device
            self._pad = to_device(np.where(inside, start[:, None] + column, 0).reshape(-1), device)
            self._unpad = to_device(np.flatnonzero(inside.reshape(-1)), device)

    def pad(self, flat: Tensor) -> Tensor:
        """[rows, ...] -> [sequences, longest, ...]."""
        picked = flat if self.even else flat.index_select(0, self._pad)
        return picked.reshape(self.count, self.longest, *flat.shape[1:])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (self.pad(t[0].transpose(0, 1)).transpose(1, 2) for t in (query, key, value))
        if self.cache is not None:
            for kind, t in (("k", k), ("v", v)):
                slab = self.cache.prefixes.slab((kind, module.layer_idx), t.shape[1], t.shape[3:], t)
                first = int(self.slots[0])
                slab[first : first + self.count, :, : self.longest] = t
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        flat = out.transpose(1, 2).reshape(self.count * self.longest, *out.shape[1:2], out.shape[3])
        if not self.even:
            flat = flat.index_select(0, self._unpad)
        return flat.unsqueeze(0)


@dataclass
class Layout:
    """Which cached tokens the rows of one decode call see; made once a call and used by every layer.

    Row i feeds ``counts[i]`` tokens that follow what its slot holds. Queries are padded to ``queries`` a row.
    """

    cache: Cache
    slots: np.ndarray
    counts: np.ndarray
    device: torch.device

    def __post_init__(self) -> None:
        own = self.cache.own
        self.rows, self.queries = len(self.slots), int(self.counts.max())
        self.even = bool((self.counts == self.queries).all())
        self.before = own.lengths[self.slots].copy()
        self.after = self.before + self.counts
        self.width = int(self.after.max())
        own.reserve(own.size, self.width)
        self.dense = bool((self.slots == np.arange(self.rows)).all())
        self.level = bool((self.after == self.width).all())
        self._groups()

    def _groups(self) -> None:
        prefixes = self.cache.prefixes
        used, group = np.unique(self.cache.prefix_of[self.slots], return_inverse=True)
        size = np.bincount(group)
        order = np.argsort(group, kind="stable")
        within = np.arange(self.rows) - np.repeat(size.cumsum() - size, size)
        self.groups, self.members = len(used), int(size.max())
        lengths = prefixes.lengths[used]
        self.prefix_width = int(lengths.max())
        gather = np.zeros(self.groups * self.members, np.int64)
        place = group[order] * self.members + within
        gather[place] = order
        scatter = np.empty(self.rows, np.int64)
        scatter[order] = place
        straight = len(gather) == self.rows and bool((gather == np.arange(self.rows)).all())
        self.gather = None if straight else to_device(gather, self.device)
        self.scatter = None if straight else to_device(scatter, self.device)
        dense = bool((used == np.arange(self.groups)).all())
        self.prefix_slots = None if dense else to_device(used, self.device)
        self.prefix_mask = None
        if int(lengths.min()) < self.prefix_width:
            hidden = np.arange(self.prefix_width) >= lengths[:, None]
            self.prefix_mask = to_device(np.where(hidden, np.float32(_NEVER), np.float32(0)), self.device)

    @cached_property
    def own_mask(self) -> Tensor | None:
        """[rows, queries, width] float32 to add to scores; None when every query sees every column."""
        if self.queries == 1 and self.level:
            return None
        last = self.before[:, None] + np.arange(self.queries)
        hidden = np.arange(self.width) > last[:, :, None]
        return to_device(np.where(hidden, np.float32(_NEVER), np.float32(0)), self.device)

    @cached_property
    def own_slots(self) -> Tensor | None:
        """Where the rows' own slabs are, None when they are the first ones in order."""
        return None if self.dense else to_device(self.slots, self.device)

    @cached_property
    def token_slots(self) -> Tensor:
        """[tokens] slot each fed token is written to."""
        return to_device(np.repeat(self.slots, self.counts), self.device)

    @property
    def within(self) -> np.ndarray:
        """[tokens] index of each fed token among its row's."""
        return np.arange(int(self.counts.sum())) - np.repeat(self.counts.cumsum() - self.counts, self.counts)

    @cached_property
    def token_columns(self) -> Tensor:
        """[tokens] column each fed token is written to."""
        return to_device(np.repeat(self.before, self.counts) + self.within, self.device)

    @cached_property
    def query_pad(self) -> Tensor:
        """[rows * queries] fed token at each padded query; token 0 where there is none."""
        start = self.counts.cumsum() - self.counts
        column = np.arange(self.queries)
        real = column < self.counts[:, None]
        return to_device(np.where(real, start[:, None] + column, 0).reshape(-1), self.device)

    @cached_property
    def query_unpad(self) -> Tensor:
        """[tokens] padded query of each fed token."""
        real = np.arange(self.queries) < self.counts[:, None]
        return to_device(np.flatnonzero(real.reshape(-1)), self.device)

    @property
    def positions(self) -> np.ndarray:
        """[tokens] index of each fed token in its sequence."""
        first = self.cache.prefixes.lengths[self.cache.prefix_of[self.slots]] + self.before
        return np.repeat(first, self.counts) + self.within

    def write(self, slab: Tensor, flat: Tensor) -> None:
        """Store the fed tokens' entries, flat [tokens, heads, ...], in an own slab."""
        if self.queries == 1 and self.level and self.dense:
            slab[: self.rows, :, self.width - 1] = flat
        else:
            slab[self.token_slots, :, self.token_columns] = flat


class DecodeCall:
    """Some tokens of each of many cached rows."""

    def __init__(self, ctx: Context, layout: Layout) -> None:
        self.ctx, self.layout = ctx, layout

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        lay, own = self.layout, self.layout.cache.own
        slabs = []
        for kind, t in (("k", key), ("v", value)):
            slab = own.slab((kind, module.layer_idx), t.shape[1], t.shape[3:], t)
            lay.write(slab, t[0].transpose(0, 1))
            slabs.append(slab)
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        # One batch entry a (row, kv head), its queries and the heads that share it as matrix rows.
        stacked = lay.queries * (heads // kv_heads)
        q = query[0].transpose(0, 1)
        if not lay.even:
            q = q.index_select(0, lay.query_pad)
        q = q.reshape(lay.rows, lay.queries, kv_heads, heads // kv_heads, dim).transpose(1, 2)
        q = q.reshape(lay.rows, kv_heads, stacked, dim)
        parts = [self._own(q, *slabs, scaling), self._prefix(q, module.layer_idx, scaling)]
        out = _join(parts).to(value.dtype)
        out = out.view(lay.rows, kv_heads, lay.queries, heads // kv_heads, -1).transpose(1, 2)
        out = out.reshape(lay.rows * lay.queries, heads, -1)
        if not lay.even:
            out = out.index_select(0, lay.query_unpad)
        return out.unsqueeze(0)

    def _own(self, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        lay = self.layout
        rows, kv_heads, stacked, _ = q.shape
        mask = lay.own_mask
        if mask is not None:
            repeat = stacked // lay.queries
            mask = mask[:, None, :, None].expand(-1, kv_heads, -1, repeat, -1)
            mask = mask.reshape(rows * kv_heads, stacked, lay.width)
        k, v = (_batch(slab, rows, lay.own_slots, lay.width) for slab in (keys, values))
        parts = _partial(q.reshape(rows * kv_heads, stacked, -1), k, v, scaling, mask)
        return tuple(p.view(rows, kv_heads, stacked, -1) for p in parts)  # type: ignore[return-value]

    def _prefix(self, q: Tensor, layer: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        lay = self.layout
        _, kv_heads, stacked, dim = q.shape
        if lay.gather is not None:
            q = q.index_select(0, lay.gather)
        q = q.view(lay.groups, lay.members, kv_heads, stacked, dim).transpose(1, 2)
        slabs = lay.cache.prefixes.slabs
        k, v = (_batch(slabs[kind, layer], lay.groups, lay.prefix_slots, lay.prefix_width) for kind in ("k", "v"))
        mask = lay.prefix_mask
        if mask is not None:
            mask = mask[:, None].expand(-1, kv_heads, -1).reshape(lay.groups * kv_heads, 1, lay.prefix_width)
        parts = _partial(q.reshape(lay.groups * kv_heads, lay.members * stacked, dim), k, v, scaling, mask)

        def back(part: Tensor) -> Tensor:
            rows = part.view(lay.groups, kv_heads, lay.members, stacked, -1).transpose(1, 2)
            rows = rows.reshape(lay.groups * lay.members, kv_heads, stacked, -1)
            return rows if lay.scatter is None else rows.index_select(0, lay.scatter)

        return tuple(back(p) for p in parts)  # type: ignore[return-value]


def _batch(slab: Tensor, count: int, slots: Tensor | None, width: int) -> Tensor:
    """[slots, heads, capacity, dim] -> [count * heads, width, dim], a view unless slots must be picked."""
    if slots is not None:
        slab = slab[:, :, :width].index_select(0, slots)
    return slab.view(-1, *slab.shape[2:])[: count * slab.shape[1], :width]


def _partial(q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised attention over one part: q [b, m, d], k [b, t, d], v [b, t, e] -> weighted sum of v [b, m, e],
    maximum [b, m, 1] and sum [b, m, 1] of the scores' exponentials, all float32."""
    scores = _product(q, k.transpose(1, 2)).mul_(scaling)
    if mask is not None:
        scores += mask
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return _product(weights.to(v.dtype), v), top, weights.sum(-1, keepdim=True)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """bmm with a float32 result. Half-precision operands multiply exactly in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _join(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Join two partial softmaxes."""
    (out_a, top_a, sum_a), (out_b, top_b, sum_b) = parts
    top = torch.maximum(top_a, top_b)
    scale_a, scale_b = (top_a - top).exp_(), (top_b - top).exp_()
    return (out_a * scale_a + out_b * scale_b) / (sum_a * scale_a + sum_b * scale_b)
