"""The rows of a decode call: slots, masks and positions derived from the cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from miles_embedded.engine.cache import Cache, round_up, to_device
from miles_embedded.model.attention import AttentionOptions

_NEVER = -1e30
#: Round the width of own tokens up to a multiple of this: products with very few columns take a slow path on a CPU.
_STEP = 16


@dataclass
class CachedRows:
    """Which cached tokens each row of a decode call attends to. Created once per call and used by every layer.

    Row i feeds ``counts[i]`` tokens, appended to the tokens in its slot. Queries are padded to ``queries`` per row. With ``parents``
    the new tokens form a tree: a token attends to the tokens in front of the tree, its ancestors and itself, and its depth in the
    tree determines its position.

    Attributes:
        cache: the cache of the rows; room for the fed tokens is reserved.
        slots: [rows] slot of each row's own tokens.
        counts: [rows] number of tokens that each row feeds.
        device: device of the model.
        lengths: [rows] own tokens in front of the fed tokens (or of the tree); None uses the lengths of the slots.
        parents: [rows, nodes] index of each node's parent in the row's tree, smaller than the node's own index, or -1 for a root.
            The fed tokens are the last nodes, the same number for each row.
        count: number of rows.
        before: [rows] own tokens in the cache before this call.
        prefix_lengths: [rows] prompt length of each row.
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
        """[rows, queries, prefix_width + width] float32, added to scores: 0 where a query attends to a token."""
        queries = torch.arange(self.queries, device=self.device)
        last = to_device(self.before, self.device)[:, None] + queries
        ends = to_device(self.prefix_lengths - 1, self.device)[:, None].expand(-1, self.queries)
        own = self._columns_after(self.width, last) if self.parents is None else self._tree_hidden(self.parents)
        hidden = torch.cat([self._columns_after(self.prefix_width, ends), own], -1)
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, _NEVER)

    @cached_property
    def longest(self) -> int:
        """Largest number of tokens that a query attends to."""
        return int((self.prefix_lengths + self.after).max())

    def masked(self, options: AttentionOptions) -> Tensor:
        """Return ``mask`` restricted by the window, chunk and chosen keys of ``options``."""
        mask = self.mask
        if options.hides != (0, 0):
            if options.hides not in self._narrow:
                self._narrow[options.hides] = mask.masked_fill(~self._in_window(options), _NEVER)
            mask = self._narrow[options.hides]
        return mask if options.choice is None else mask.masked_fill(~options.choice.masks, _NEVER)

    def _in_window(self, options: AttentionOptions) -> Tensor:
        """[rows, queries, prefix_width + width] True for tokens inside the window and the chunk of a query."""
        prompt = to_device(self.prefix_lengths, self.device)[:, None, None]
        before = to_device(self.before, self.device)[:, None, None]
        query = prompt + before + torch.arange(self.queries, device=self.device)[:, None]
        column, own = (torch.arange(width, device=self.device) for width in (self.prefix_width, self.width))
        return torch.cat([options.sees(query, column), options.sees(query, prompt + own)], -1)

    def _columns_after(self, width: int, last: Tensor) -> Tensor:
        """[rows, queries, width] True for columns after ``last`` [rows, queries]."""
        return torch.arange(width, device=self.device) > last[:, :, None]

    def _tree_hidden(self, parents: np.ndarray) -> Tensor:
        """[rows, queries, width] True for columns that a tree node does not attend to."""
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
        """Slots of the rows; None when they are the first slots in order."""
        return None if self.dense else to_device(self.slots, self.device)

    @cached_property
    def token_slots(self) -> Tensor:
        """[tokens] destination slot of each fed token."""
        return to_device(np.repeat(self.slots, self.counts), self.device)

    @property
    def within(self) -> np.ndarray:
        """[tokens] index of each fed token among the fed tokens of its row."""
        return np.arange(int(self.counts.sum())) - np.repeat(self.counts.cumsum() - self.counts, self.counts)

    @cached_property
    def token_columns(self) -> Tensor:
        """[tokens] destination column of each fed token."""
        return to_device(np.repeat(self.before, self.counts) + self.within, self.device)

    @cached_property
    def query_pad(self) -> Tensor:
        """[rows * queries] index of the fed token of each padded query; 0 for padding."""
        start = self.counts.cumsum() - self.counts
        column = np.arange(self.queries)
        real = column < self.counts[:, None]
        return to_device(np.where(real, start[:, None] + column, 0).reshape(-1), self.device)

    @cached_property
    def query_unpad(self) -> Tensor:
        """[tokens] index of the padded query of each fed token."""
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
        """Store the fed tokens' entries [tokens, heads, ...] in ``slab`` of the own store."""
        if self.queries == 1 and self.level and self.dense:
            slab[: self.count, :, int(self.before[0])] = flat
        else:
            slab[self.token_slots, :, self.token_columns] = flat
