"""Attention of the engine: over packed prompts, and over cached rows that share prompts.

Decoding computes the scores of prompt tokens and own tokens separately and applies one softmax to both. The rows of a group are
stacked as queries against a single copy of their prompt, so the prompt's keys and values are read once per group instead of once
per row. Scores and softmax are float32 for every model type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_core.errors import MilesError
from miles_embedded.engine.cache import Cache, CachedRows
from miles_embedded.engine.store import to_device
from miles_embedded.model.attention import AttentionOptions, ChosenKeys, attend_padded, causal_mask, same_block
from miles_embedded.model.indexer import Indexed, choose_in_parts
from miles_embedded.model.states import RECURRENT, STORING, Advance, LayerStates, StoredStates

#: Kind of the cache slabs that store an indexer's keys.
INDEX = "index"


class PromptCall:
    """A call over whole sequences, packed without padding: [1, sum of lengths] tokens with causal attention per sequence.

    Only attention pads, inside this call, to the longest sequence. ``slots`` are the cache slots that store the keys and values;
    None stores nothing (scoring).
    """

    def __init__(
        self, ctx: Context, lengths: Sequence[int], cache: Cache | None = None, slots: np.ndarray | None = None
    ) -> None:
        self.ctx, self.cache, self.slots = ctx, cache, slots
        self.lengths, self.count, self.longest = lengths, len(lengths), max(lengths)
        self.even = min(lengths) == self.longest
        if not self.even:
            size = np.asarray(lengths, np.int64)
            start = size.cumsum() - size
            column = np.arange(self.longest)
            inside = column < size[:, None]
            device = ctx.rows.device
            self._pad = to_device(np.where(inside, start[:, None] + column, 0).reshape(-1), device)
            self._unpad = to_device(np.flatnonzero(inside.reshape(-1)), device)

    @cached_property
    def positions(self) -> Tensor:
        """[rows] index of each token in its sequence."""
        return to_device(np.concatenate([np.arange(n) for n in self.lengths]), self.ctx.rows.device)

    @property
    def spans(self) -> np.ndarray:
        """See ``Call.spans``."""
        return np.repeat(np.asarray(self.lengths, np.int64), self.lengths)

    def pad(self, flat: Tensor) -> Tensor:
        """[rows, ...] -> [sequences, longest, ...]."""
        picked = flat if self.even else flat.index_select(0, self._pad)
        return picked.reshape(self.count, self.longest, *flat.shape[1:])

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """See ``Call.attend``."""
        q, k, v = (self.pad(t[0].transpose(0, 1)).transpose(1, 2) for t in (query, key, value))
        self.store("k", module.layer_idx, k)
        self.store("v", module.layer_idx, v)
        out = self._causal(q, k, v, scaling) if options is None else self._masked(q, k, v, scaling, options)
        flat = out.transpose(1, 2).reshape(self.count * self.longest, *out.shape[1:2], out.shape[3])
        if not self.even:
            flat = flat.index_select(0, self._unpad)
        return flat.unsqueeze(0)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        dim = v.shape[3]
        if dim < q.shape[3]:  # fused kernels, which avoid the [longest, longest] matrix, require equal head dimensions
            v = nn.functional.pad(v, (0, q.shape[3] - dim))
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )[..., :dim]

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, options: AttentionOptions) -> Tensor:
        column = torch.arange(self.longest, device=q.device)
        seen = options.sees(column[:, None], column, self._find_together(options))
        mask = seen.view(-1, 1, self.longest, self.longest)
        if options.choice is not None:
            mask = mask & options.choice.masks
        return attend_padded(q, k, v, mask, scaling, q.shape[1] != k.shape[1], options)

    def _find_together(self, options: AttentionOptions) -> Tensor | None:
        """[sequences, longest, longest] whether two tokens are in one block; None without blocks."""
        if options.blocks is None:
            return None
        blocks = self.pad(options.blocks)
        if not self.even:
            ends = to_device(np.asarray(self.lengths, np.int64), blocks.device)
            blocks = blocks.masked_fill(torch.arange(self.longest, device=blocks.device) >= ends[:, None], -1)
        return same_block(blocks[:, :, None], blocks[:, None])

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """See ``Call.choose``."""
        few = self.longest <= indexed.most
        if few and self.cache is None:
            return ChosenKeys()
        padded = indexed.map(self.pad)
        if few:
            mask, keys = None, padded.keys()
        else:
            mask, keys = choose_in_parts(
                padded, None, causal_mask(self.longest, self.longest, padded.hidden.device)[None]
            )
        self.store(INDEX, indexed.module.layer_idx, keys.unsqueeze(1))
        return ChosenKeys(None if mask is None else mask.unsqueeze(1))

    def advance(self, module: Any, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``. Prompts of equal length are computed together, so that each one's state is that after its last token."""
        flat = hidden[0]
        if self.cache is None or self.slots is None:  # no state is kept, so padding at the end has no effect
            out = compute(self.pad(flat), None).flatten(0, 1)
            return (out if self.even else out.index_select(0, self._unpad)).unsqueeze(0)
        parts = []
        for prompts, rows in self._by_length:
            states = LayerStates()
            batch = flat.index_select(0, rows).view(len(prompts), -1, flat.shape[-1])
            parts.append(compute(batch, states).flatten(0, 1))
            slots = to_device(self.slots[prompts], flat.device)
            for key, kept in states.kept.items():
                self.cache.prefixes.state(module.layer_idx, key, kept)[slots] = kept
        return torch.cat(parts).index_select(0, self._by_length_inverse).unsqueeze(0)

    @cached_property
    def _by_length(self) -> list[tuple[np.ndarray, Tensor]]:
        """Prompts of each length, and the rows of their tokens."""
        size = np.asarray(self.lengths, np.int64)
        start = size.cumsum() - size
        found = []
        for length in np.unique(size):
            prompts = np.flatnonzero(size == length)
            rows = (start[prompts, None] + np.arange(length)).ravel()
            found.append((prompts, to_device(rows, self.ctx.rows.device)))
        return found

    @cached_property
    def _by_length_inverse(self) -> Tensor:
        return torch.cat([rows for _, rows in self._by_length]).argsort()

    def store(self, kind: str, layer: int, entries: Tensor) -> None:
        """Store entries [sequences, heads, longest, ...] if this call has cache slots."""
        if self.cache is None or self.slots is None:
            return
        slab = self.cache.prefixes.slab((kind, layer), entries.shape[1], entries.shape[3:], entries)
        first = int(self.slots[0])
        slab[first : first + self.count, :, : self.longest] = entries


@dataclass(frozen=True)
class Prompts:
    """Computed prompts, packed one after the other.

    Attributes:
        call: the call of the prompts; additional layers that attend through it store their keys and values with the prompts'.
        tokens: [n] ids.
        positions: [n] index of each token in its prompt.
        hidden: [n, hidden] after the last norm.
    """

    call: PromptCall
    tokens: Tensor
    positions: Tensor
    hidden: Tensor


class DecodeCall:
    """A call that feeds one or more tokens to each of many cached rows."""

    def __init__(self, ctx: Context, rows: CachedRows) -> None:
        self.ctx, self.rows = ctx, rows

    @property
    def longest(self) -> int:
        """Largest number of tokens that a query attends to."""
        return self.rows.longest

    @cached_property
    def positions(self) -> Tensor:
        """[rows] index of each fed token in its sequence."""
        return to_device(self.rows.positions, self.rows.device)

    @property
    def spans(self) -> np.ndarray:
        """See ``Call.spans``."""
        return self.rows.positions + 1

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """See ``Call.attend``."""
        held = self.rows
        own_k, own_v = (self._append(kind, module.layer_idx, t) for kind, t in (("k", key), ("v", value)))
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        shared = heads // kv_heads
        # One matrix per (row, kv head). Its rows are the row's queries for each query head of the kv head.
        q = query[0].transpose(0, 1)
        if not held.even:
            q = q.index_select(0, held.query_pad)
        q = q.reshape(held.count, held.queries, kv_heads, shared, dim).transpose(1, 2)
        q = q.reshape(held.count, kv_heads, held.queries * shared, dim).contiguous()

        weights = self._weights(q, module.layer_idx, own_k, shared, scaling, options).to(value.dtype)
        of_prompt, of_own = weights.split([held.prefix_width, held.width], -1)
        slab = self._prompt_slab("v", module.layer_idx, own_v)
        v = _batch(slab, held.groups, held.prefix_slots, held.prefix_width)
        out = self._ungroup_rows(product(self._group_rows(of_prompt), v), kv_heads)
        v = _batch(own_v, held.count, held.own_slots, held.width)
        out = out + product(of_own.reshape(held.count * kv_heads, -1, held.width), v).view(out.shape)

        out = out.view(held.count, kv_heads, held.queries, shared, -1).transpose(1, 2)
        out = out.reshape(held.count * held.queries, heads, -1).to(value.dtype)
        if not held.even:
            out = out.index_select(0, held.query_unpad)
        return out.unsqueeze(0)

    def advance(self, module: Any, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``."""
        held = self.rows
        if held.queries > 1 or held.parents is not None:
            raise MilesError(
                f"{type(module).__name__} keeps a state after its last token only, so a decoder cannot feed several tokens per step and "
                "drop some of them; run without drafts"
            )
        return advance_rows(held.cache, *held.states, module, hidden, compute)

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """See ``Call.choose``."""
        held, layer = self.rows, indexed.module.layer_idx
        few = held.longest <= indexed.most

        def extend(fed: Tensor) -> Tensor:
            """Store the fed tokens' keys [rows, queries, dim]; returns the keys of all tokens, in the column order of ``CachedRows.mask``."""
            flat = fed.flatten(0, 1)
            own = self._append(
                INDEX, layer, (flat if held.even else flat.index_select(0, held.query_unpad))[None, None]
            )
            if few:
                return fed[:, :1]
            slots = to_device(held.cache.prefix_of[held.slots], held.device)
            prompts = held.cache.prefixes.slabs[INDEX, layer][slots, 0, : held.prefix_width]
            own = own[: held.count] if held.own_slots is None else own.index_select(0, held.own_slots)
            return torch.cat([prompts, own[:, 0, : held.width]], 1)

        if not held.even:
            indexed = indexed.map(torch.index_select, 0, held.query_pad)
        indexed = indexed.map(lambda x: x.view(held.count, held.queries, *x.shape[1:]))
        seen = held.mask == 0
        kept = indexed.choose(extend, seen[:, :, :1] if few else seen)
        return ChosenKeys(None if few else kept)

    def _weights(
        self, q: Tensor, layer: int, own_k: Tensor, shared: int, scaling: float, options: AttentionOptions | None
    ) -> Tensor:
        """Softmax weights over prompt and own tokens, [rows, kv_heads, queries * shared, prefix_width + width] float32."""
        held = self.rows
        rows, kv_heads, stacked, dim = q.shape
        k = _batch(self._prompt_slab("k", layer, own_k), held.groups, held.prefix_slots, held.prefix_width)
        of_prompt = self._ungroup_rows(product(self._group_rows(q), k.transpose(1, 2)), kv_heads)
        k = _batch(own_k, rows, held.own_slots, held.width)
        of_own = product(q.view(rows * kv_heads, stacked, dim), k.transpose(1, 2))
        scores = torch.cat([of_prompt, of_own.view(rows, kv_heads, stacked, held.width)], -1).mul_(scaling)
        if options is not None and options.cap:
            scores.div_(options.cap).tanh_().mul_(options.cap)
        by_query = scores.view(rows, kv_heads, held.queries, shared, -1)
        if options is None:
            by_query += held.mask[:, None, :, None]
            return scores.softmax(-1)
        by_query += held.masked(options)[:, None, :, None]
        if options.sinks is None:
            return scores.softmax(-1)
        sinks = options.sinks.to(scores.dtype).view(kv_heads, 1, shared, 1).expand(rows, -1, held.queries, -1, -1)
        return torch.cat([by_query, sinks], -1).softmax(-1)[..., :-1].reshape(scores.shape)

    def _append(self, kind: str, layer: int, fed: Tensor) -> Tensor:
        """Write the fed tokens' keys or values; returns their slab."""
        slab = self.rows.cache.own.slab((kind, layer), fed.shape[1], fed.shape[3:], fed)
        self.rows.write(slab, fed[0].transpose(0, 1))
        return slab

    def _prompt_slab(self, kind: str, layer: int, own: Tensor) -> Tensor:
        """Return the slab of the prompts. For a layer that did not compute them, such as one of a draft, it contains zeros."""
        return self.rows.cache.prefixes.slab((kind, layer), own.shape[1], own.shape[3:], own)

    def _group_rows(self, by_row: Tensor) -> Tensor:
        """Stack rows by prompt: [rows, kv_heads, m, n] -> [groups * kv_heads, members * m, n]."""
        held, (_, kv_heads, m, n) = self.rows, by_row.shape
        if held.gather is not None:
            by_row = by_row.index_select(0, held.gather)
        stacked = by_row.view(held.groups, held.members, kv_heads, m, n).transpose(1, 2)
        return stacked.reshape(held.groups * kv_heads, held.members * m, n)

    def _ungroup_rows(self, by_group: Tensor, kv_heads: int) -> Tensor:
        """Invert ``_group_rows``."""
        held, n = self.rows, by_group.shape[-1]
        rows = by_group.view(held.groups, kv_heads, held.members, -1, n).transpose(1, 2)
        rows = rows.reshape(held.groups * held.members, kv_heads, -1, n)
        return rows if held.scatter is None else rows.index_select(0, held.scatter)


def advance_rows(cache: Cache, before: Tensor, after: Tensor, module: Any, hidden: Tensor, compute: Advance) -> Tensor:
    """Compute a layer for one token of each row; reads no number from the host.

    Args:
        cache: with the states of the rows.
        before, after: [rows] where the states in front of the tokens are, and where those after them are stored.
        module, hidden, compute: see ``Call.advance``.

    Returns:
        [1, rows, hidden].
    """
    slabs = cache.own.states[module.layer_idx]
    stored = {key for key in slabs if key[0] == RECURRENT} if STORING in module.__dict__ else set()
    states = LayerStates(
        {k: StoredStates(v, before, after) if k in stored else v.index_select(0, before) for k, v in slabs.items()}
    )
    out = compute(hidden[0].unsqueeze(1), states)
    for key in states.kept.keys() - stored:
        slabs[key].index_copy_(0, after, states.kept[key].to(slabs[key].dtype))
    return out.transpose(0, 1)


def _batch(slab: Tensor, count: int, slots: Tensor | None, width: int) -> Tensor:
    """[slots, heads, capacity, dim] -> [count * heads, width, dim]; a view unless ``slots`` selects slots."""
    if slots is not None:
        slab = slab[:, :, :width].index_select(0, slots)
    return slab.view(-1, *slab.shape[2:])[: count * slab.shape[1], :width]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product with a float32 result; half-precision operands are multiplied exactly in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
