"""The rows of one decode call as the cache holds them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from miles_embedded.engine.cache import Cache, round_up, to_device
from miles_embedded.model.attention import AttentionOptions

_NEVER = -1e30
#: Own tokens are attended to in multiples of this: products over very few columns take a slow path on a CPU.
_STEP = 16


@dataclass
class CachedRows:
    """Which cached tokens the rows of one decode call see; made once a call and used by every layer.

    Row i feeds ``counts[i]`` tokens that follow what its slot holds. Queries are padded to ``queries`` a row. With ``parents``
    what follows is a tree: a token sees what is in front of the tree, its ancestors and itself, and its position is its depth.

    Attributes:
        cache: where the rows are; room for the fed tokens is reserved.
        slots: [rows] slot of each row's own tokens.
        counts: [rows] tokens that each row feeds.
        device: of the model.
        lengths: [rows] own tokens in front of those that are fed (of the tree); None: all that the slots hold.
        parents: [rows, nodes] of each node of a row's tree the parent, a node before it or -1 for none; the tokens that are
            fed are its last nodes, as many for each row.
        count: how many rows.
        before: [rows] own tokens in the cache before this call.
        prefix_lengths: [rows] tokens of each row's prompt.
    """

    cache: Cache
    slots: np.ndarray
    counts: np.ndarray
    device: torch.device
    lengths: np.ndarray | None = None
    parents: np.ndarray | None = None

    def __post_init__(self) -> None:
        own = self.cache.own
        self.count, self.queries = len(self.slots), int(self.counts.max())
        self.even = bool((self.counts == self.queries).all())
        self.front = own.lengths[self.slots].copy() if self.lengths is None else self.lengths
        self.before = self.front if self.parents is None else self.front + self.parents.shape[1] - self.counts
        self.after = self.before + self.counts
        self.width = round_up(int(self.after.max()), _STEP)
        own.reserve(own.size, self.width)
        self.dense = bool((self.slots == np.arange(self.count)).all())
        self.level = bool((self.after == self.after[0]).all())
        self._narrow: dict[tuple[int, int], Tensor] = {}
        self._groups()

    def _groups(self) -> None:
        prefixes = self.cache.prefixes
        used, group = np.unique(self.cache.prefix_of[self.slots], return_inverse=True)
        size = np.bincount(group)
        order = np.argsort(group, kind="stable")
        within = np.arange(self.count) - np.repeat(size.cumsum() - size, size)
        self.groups, self.members = len(used), int(size.max())
        lengths = prefixes.lengths[used]
        self.prefix_width = int(lengths.max())
        gather = np.zeros(self.groups * self.members, np.int64)
        place = group[order] * self.members + within
        gather[place] = order
        scatter = np.empty(self.count, np.int64)
        scatter[order] = place
        straight = len(gather) == self.count and bool((gather == np.arange(self.count)).all())
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
        own = self._beyond(self.width, last) if self.parents is None else self._strangers(self.parents)
        hidden = torch.cat([self._beyond(self.prefix_width, ends), own], -1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, _NEVER)

    @cached_property
    def longest(self) -> int:
        """The most tokens that a query sees."""
        return int((self.prefix_lengths + self.after).max())

    def masked(self, options: AttentionOptions) -> Tensor:
        """``mask`` for queries that see less."""
        mask = self.mask
        if options.hides != (0, 0):
            if options.hides not in self._narrow:
                self._narrow[options.hides] = mask.masked_fill(~self._within(options), _NEVER)
            mask = self._narrow[options.hides]
        return mask if options.choice is None else mask.masked_fill(~options.choice.masks, _NEVER)

    def _within(self, options: AttentionOptions) -> Tensor:
        """[rows, queries, prefix_width + width] True for tokens in the window and the chunk of a query."""
        prompt = to_device(self.prefix_lengths, self.device)[:, None, None]
        before = to_device(self.before, self.device)[:, None, None]
        query = prompt + before + torch.arange(self.queries, device=self.device)[:, None]
        column, own = (torch.arange(width, device=self.device) for width in (self.prefix_width, self.width))
        return torch.cat([options.sees(query, column), options.sees(query, prompt + own)], -1)

    def _beyond(self, width: int, last: Tensor) -> Tensor:
        """[rows, queries, width] True for columns after ``last`` [rows, queries]."""
        return torch.arange(width, device=self.device) > last[:, :, None]

    def _strangers(self, parents: np.ndarray) -> Tensor:
        """[rows, queries, width] True for columns that a node of a tree does not see."""
        nodes = parents.shape[1]
        family = np.zeros((self.count, nodes, nodes), bool)
        row = np.arange(self.count)
        for node in range(nodes):
            above = parents[:, node]
            family[:, node] = family[row, above] & (above >= 0)[:, None]
            family[:, node, node] = True
        column = np.arange(self.width) - self.front[:, None]
        at = np.broadcast_to(column.clip(0, nodes - 1)[:, None], (self.count, self.queries, self.width))
        inside = ((column >= 0) & (column < nodes))[:, None]
        seen = np.where(inside, np.take_along_axis(family[:, nodes - self.queries :], at, 2), (column < 0)[:, None])
        return to_device(~seen, self.device)

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
        if self.parents is not None:
            depth = np.zeros(self.parents.shape, np.int64)
            for node, above in enumerate(self.parents.T):
                depth[:, node] = np.where(above < 0, 0, depth[np.arange(self.count), above] + 1)
            return ((self.prefix_lengths + self.front)[:, None] + depth[:, -self.queries :]).reshape(-1)
        return np.repeat(self.prefix_lengths + self.before, self.counts) + self.within

    def write(self, slab: Tensor, flat: Tensor) -> None:
        """Store the fed tokens' entries, flat [tokens, heads, ...], in an own slab."""
        if self.queries == 1 and self.level and self.dense:
            slab[: self.count, :, int(self.before[0])] = flat
        else:
            slab[self.token_slots, :, self.token_columns] = flat
