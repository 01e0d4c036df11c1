"""How rows attend: to a packed prompt, and to a shared prompt plus their own tokens.

Decoding multiplies queries with the two stores of the cache apart and takes one softmax over both. The rows of a group
are stacked as queries against one copy of their prompt, so its keys and values are read once a group and not once a row.
Scores and softmax are float32 whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_embedded.cpu import operations
from miles_embedded.cpu.install import compiled
from miles_embedded.engine.cache import Cache, round_up, to_device
from miles_embedded.model.indexer import Indexed, chosen
from miles_embedded.model.sight import Choice, Sight, causal
from miles_embedded.trainer.attention import attend_padded

_NEVER = -1e30
#: Slabs of the cache with an indexer's keys.
INDEX = "index"
#: Own tokens are attended to in multiples of this: products over very few columns take a slow path on a CPU.
_STEP = 16
#: Up to this many tokens a CPU is faster with a compiled loop over rows than with products (benchmarks/cpu_kernels.py).
_COMPILED = 64


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

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight | None = None
    ) -> Tensor:
        """See ``Call.attend``."""
        q, k, v = (self.pad(t[0].transpose(0, 1)).transpose(1, 2) for t in (query, key, value))
        self._keep("k", module.layer_idx, k)
        self._keep("v", module.layer_idx, v)
        if sight is not None:
            sight = sight.within(self.longest)
        out = self._causal(q, k, v, scaling) if sight is None else self._masked(q, k, v, scaling, sight)
        flat = out.transpose(1, 2).reshape(self.count * self.longest, *out.shape[1:2], out.shape[3])
        if not self.even:
            flat = flat.index_select(0, self._unpad)
        return flat.unsqueeze(0)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        dim = v.shape[3]
        if dim < q.shape[3]:  # kernels that never form the [longest, longest] matrix want one size for all
            v = nn.functional.pad(v, (0, q.shape[3] - dim))
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )[..., :dim]

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, sight: Sight) -> Tensor:
        mask = causal(self.longest, self.longest, sight.window, q.device)[None, None]
        if sight.choice is not None:
            mask = mask & sight.choice.masks
        return attend_padded(q, k, v, mask, scaling, q.shape[1] != k.shape[1], sight.sinks)

    def choose(self, indexed: Indexed) -> Choice:
        """See ``Call.choose``."""
        few = self.longest <= indexed.most
        if few and self.cache is None:
            return Choice()
        padded = indexed.map(self.pad)
        if few:
            mask, keys = None, padded.keys()
        else:
            mask, keys = chosen(padded, None, causal(self.longest, self.longest, 0, padded.hidden.device)[None])
        self._keep(INDEX, indexed.module.layer_idx, keys.unsqueeze(1))
        return Choice(None if mask is None else mask.unsqueeze(1))

    def _keep(self, kind: str, layer: int, entries: Tensor) -> None:
        """Store entries [sequences, heads, longest, ...] in the cache, where there is one."""
        if self.cache is None:
            return
        slab = self.cache.prefixes.slab((kind, layer), entries.shape[1], entries.shape[3:], entries)
        first = int(self.slots[0])
        slab[first : first + self.count, :, : self.longest] = entries


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
        self.width = round_up(int(self.after.max()), _STEP)
        own.reserve(own.size, self.width)
        self.dense = bool((self.slots == np.arange(self.rows)).all())
        self.level = bool((self.after == self.after[0]).all())
        self._windows: dict[int, Tensor] = {}
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
        self.prefix_lengths = lengths[group]

    @cached_property
    def mask(self) -> Tensor:
        """[rows, queries, prefix_width + width] float32 to add to scores: 0 where a query sees a token."""
        queries = torch.arange(self.queries, device=self.device)
        last = to_device(self.before, self.device)[:, None] + queries
        ends = to_device(self.prefix_lengths - 1, self.device)[:, None].expand(-1, self.queries)
        hidden = torch.cat([self._beyond(self.prefix_width, ends), self._beyond(self.width, last)], -1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, _NEVER)

    @cached_property
    def longest(self) -> int:
        """The most tokens that a query sees."""
        return int((self.prefix_lengths + self.after).max())

    def masked(self, sight: Sight) -> Tensor:
        """``mask`` for queries that see less."""
        mask = self.mask
        if sight.window:
            if sight.window not in self._windows:
                self._windows[sight.window] = mask.masked_fill(self._gone(sight.window), _NEVER)
            mask = self._windows[sight.window]
        return mask if sight.choice is None else mask.masked_fill(~sight.choice.masks, _NEVER)

    def _gone(self, window: int) -> Tensor:
        """[rows, queries, prefix_width + width] True for tokens that left the window of a query."""
        queries = torch.arange(self.queries, device=self.device)
        last = to_device(self.before, self.device)[:, None, None] + queries[:, None] - window
        prompt = to_device(self.prefix_lengths, self.device)[:, None, None]
        columns = (torch.arange(width, device=self.device) for width in (self.prefix_width, self.width))
        return torch.cat([column <= end for column, end in zip(columns, (prompt + last, last), strict=True)], -1)

    def _beyond(self, width: int, last: Tensor) -> Tensor:
        """[rows, queries, width] True for columns after ``last`` [rows, queries]."""
        return torch.arange(width, device=self.device) > last[:, :, None]

    @cached_property
    def cached(self) -> operations.Cached:
        """The same for the compiled step."""
        offsets = np.concatenate([[0], self.counts.cumsum()])
        arrays = (offsets, self.cache.prefix_of[self.slots], self.prefix_lengths, self.slots, self.before)
        return operations.Cached(*(torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in arrays))

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
            slab[: self.rows, :, int(self.before[0])] = flat
        else:
            slab[self.token_slots, :, self.token_columns] = flat


class DecodeCall:
    """Some tokens of each of many cached rows."""

    def __init__(self, ctx: Context, layout: Layout) -> None:
        self.ctx, self.layout = ctx, layout

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight | None = None
    ) -> Tensor:
        """See ``Call.attend``."""
        lay = self.layout
        if sight is not None:
            sight = sight.within(lay.longest)
        if sight is None and lay.longest <= _COMPILED and compiled(module, query, key, value):
            return self._compiled(module.layer_idx, query, key, value, scaling)
        own_k, own_v = (self._append(kind, module.layer_idx, t) for kind, t in (("k", key), ("v", value)))
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        shared = heads // kv_heads
        # One matrix a (row, kv head); its rows are the queries, and the heads that share the kv head.
        q = query[0].transpose(0, 1)
        if not lay.even:
            q = q.index_select(0, lay.query_pad)
        q = q.reshape(lay.rows, lay.queries, kv_heads, shared, dim).transpose(1, 2)
        q = q.reshape(lay.rows, kv_heads, lay.queries * shared, dim).contiguous()

        weights = self._weights(q, module.layer_idx, own_k, shared, scaling, sight).to(value.dtype)
        of_prompt, of_own = weights.split([lay.prefix_width, lay.width], -1)
        slab = lay.cache.prefixes.slabs["v", module.layer_idx]
        v = _batch(slab, lay.groups, lay.prefix_slots, lay.prefix_width)
        out = self._by_row(_product(self._by_group(of_prompt), v), kv_heads)
        v = _batch(own_v, lay.rows, lay.own_slots, lay.width)
        out = out + _product(of_own.reshape(lay.rows * kv_heads, -1, lay.width), v).view(out.shape)

        out = out.view(lay.rows, kv_heads, lay.queries, shared, -1).transpose(1, 2)
        out = out.reshape(lay.rows * lay.queries, heads, -1).to(value.dtype)
        if not lay.even:
            out = out.index_select(0, lay.query_unpad)
        return out.unsqueeze(0)

    def _compiled(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """``attend`` in one step."""
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        cache = self.layout.cache
        prompts = tuple(cache.prefixes.slabs[kind, layer] for kind in ("k", "v"))
        own = tuple(cache.own.slab((kind, layer), x.shape[1], x.shape[2:], x) for kind, x in (("k", k), ("v", v)))
        return operations.cached_attention(q, k, v, prompts, own, self.layout.cached, scaling).unsqueeze(0)

    def choose(self, indexed: Indexed) -> Choice:
        """See ``Call.choose``."""
        lay, layer = self.layout, indexed.module.layer_idx
        few = lay.longest <= indexed.most

        def extend(fed: Tensor) -> Tensor:
            """Keep the fed tokens' keys [rows, queries, dim]; those of all tokens, as the columns of ``Layout.mask``."""
            flat = fed.flatten(0, 1)
            own = self._append(INDEX, layer, (flat if lay.even else flat.index_select(0, lay.query_unpad))[None, None])
            if few:
                return fed[:, :1]
            slots = to_device(lay.cache.prefix_of[lay.slots], lay.device)
            prompts = lay.cache.prefixes.slabs[INDEX, layer][slots, 0, : lay.prefix_width]
            own = own[: lay.rows] if lay.own_slots is None else own.index_select(0, lay.own_slots)
            return torch.cat([prompts, own[:, 0, : lay.width]], 1)

        if not lay.even:
            indexed = indexed.map(torch.index_select, 0, lay.query_pad)
        indexed = indexed.map(lambda x: x.view(lay.rows, lay.queries, *x.shape[1:]))
        seen = lay.mask == 0
        kept = indexed.choose(extend, seen[:, :, :1] if few else seen)
        return Choice(None if few else kept)

    def _weights(
        self, q: Tensor, layer: int, own_k: Tensor, shared: int, scaling: float, sight: Sight | None
    ) -> Tensor:
        """Softmax over prompt and own tokens, [rows, kv_heads, queries * shared, prefix_width + width] float32."""
        lay = self.layout
        rows, kv_heads, stacked, dim = q.shape
        k = _batch(lay.cache.prefixes.slabs["k", layer], lay.groups, lay.prefix_slots, lay.prefix_width)
        of_prompt = self._by_row(_product(self._by_group(q), k.transpose(1, 2)), kv_heads)
        k = _batch(own_k, rows, lay.own_slots, lay.width)
        of_own = _product(q.view(rows * kv_heads, stacked, dim), k.transpose(1, 2))
        scores = torch.cat([of_prompt, of_own.view(rows, kv_heads, stacked, lay.width)], -1).mul_(scaling)
        by_query = scores.view(rows, kv_heads, lay.queries, shared, -1)
        if sight is None:
            by_query += lay.mask[:, None, :, None]
            return scores.softmax(-1)
        by_query += lay.masked(sight)[:, None, :, None]
        if sight.sinks is None:
            return scores.softmax(-1)
        sinks = sight.sinks.to(scores.dtype).view(kv_heads, 1, shared, 1).expand(rows, -1, lay.queries, -1, -1)
        return torch.cat([by_query, sinks], -1).softmax(-1)[..., :-1].reshape(scores.shape)

    def _append(self, kind: str, layer: int, fed: Tensor) -> Tensor:
        """Write the fed tokens' keys or values; returns the slab."""
        slab = self.layout.cache.own.slab((kind, layer), fed.shape[1], fed.shape[3:], fed)
        self.layout.write(slab, fed[0].transpose(0, 1))
        return slab

    def _by_group(self, by_row: Tensor) -> Tensor:
        """[rows, kv_heads, m, n] -> [groups * kv_heads, members * m, n]."""
        lay, (_, kv_heads, m, n) = self.layout, by_row.shape
        if lay.gather is not None:
            by_row = by_row.index_select(0, lay.gather)
        stacked = by_row.view(lay.groups, lay.members, kv_heads, m, n).transpose(1, 2)
        return stacked.reshape(lay.groups * kv_heads, lay.members * m, n)

    def _by_row(self, by_group: Tensor, kv_heads: int) -> Tensor:
        """The inverse of ``_by_group``."""
        lay, n = self.layout, by_group.shape[-1]
        rows = by_group.view(lay.groups, kv_heads, lay.members, -1, n).transpose(1, 2)
        rows = rows.reshape(lay.groups * lay.members, kv_heads, -1, n)
        return rows if lay.scatter is None else rows.index_select(0, lay.scatter)


def _batch(slab: Tensor, count: int, slots: Tensor | None, width: int) -> Tensor:
    """[slots, heads, capacity, dim] -> [count * heads, width, dim], a view unless slots must be picked."""
    if slots is not None:
        slab = slab[:, :, :width].index_select(0, slots)
    return slab.view(-1, *slab.shape[2:])[: count * slab.shape[1], :width]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """bmm with a float32 result. Half-precision operands multiply exactly in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
