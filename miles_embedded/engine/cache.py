"""The KV cache of rows that share prompts, and the rows of one call in it.

It has two stores. ``prefixes`` stores the prompt of each group once, independently of the number of rows that continue it; ``own``
stores the tokens each row generated. A store has one slab per layer and kind, [slots, heads, width, dim], which doubles when full.
Layers that keep a state between tokens instead of keys and values (``model.states``) have slabs of their own: a prompt's state is the one
after its last token, and a row starts with a copy of it.
Live slots are always the first ones: when a row leaves, the last row moves to its slot, so a decode step attends to slices of the
slabs without copying. Recorded fields of cached tokens are stored in additional slabs that follow the same moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from miles_embedded.model.attention import AttentionOptions
from miles_embedded.model.states import StateKey

_SLOTS, _WIDTH = 8, 16
#: States kept per row: the state after n own tokens is version n % 2. A step thus reads one and writes the other, so that it can be
#: discarded and computed again, as steps launched ahead of the host are.
VERSIONS = 2


class Store:
    """Slabs for one kind of sequence.

    Args:
        versions: number of states kept per slot.

    Attributes:
        slabs: key -> [slots, heads, width, ...].
        states: layer -> key -> [slots * versions, ...].
        size: number of live slots.
        slots, width: capacity of every slab.
        lengths: [slots] tokens stored in each slot; valid up to ``size``.
        generation: incremented when a slab is created or reallocated. Holders of slab addresses must refresh them then.
    """

    def __init__(self, versions: int = 1) -> None:
        self.slabs: dict[Hashable, Tensor] = {}
        self.versions, self.states = versions, dict[int, dict[StateKey, Tensor]]()
        self.size = 0
        self.slots, self.width = _SLOTS, _WIDTH
        self.generation = 0
        self.lengths = np.zeros(_SLOTS, np.int64)

    def slab(self, key: Hashable, heads: int, tail: Sequence[int], like: Tensor) -> Tensor:
        """Return the slab ``key``, [slots, heads, width, *tail], created on first use with the dtype and device of ``like``.

        New slabs are zero, because masked entries are still multiplied by a weight of zero.
        """
        found = self.slabs.get(key)
        if found is None:
            self.generation += 1
            found = self.slabs[key] = like.new_zeros(self.slots, heads, self.width, *tail)
        return found

    def state(self, layer: int, key: StateKey, like: Tensor) -> Tensor:
        """Return the states ``key`` of a layer, [slots * versions, ...], created on first use for states ``like`` [n, ...]."""
        of_layer = self.states.setdefault(layer, {})
        if key not in of_layer:
            self.generation += 1
            of_layer[key] = like.new_zeros(self.slots * self.versions, *like.shape[1:])
        return of_layer[key]

    def reserve(self, slots: int, width: int) -> None:
        """Grow the capacity to at least ``slots`` slots of ``width`` tokens."""
        if slots <= self.slots and width <= self.width:
            return
        slots = self.slots if slots <= self.slots else max(slots, min(2 * self.slots, slots + 256))
        width = self.width if width <= self.width else round_up(max(width, min(2 * self.width, width + 1024)), _WIDTH)
        self.generation += 1
        for key, old in self.slabs.items():
            new = old.new_zeros(slots, old.shape[1], width, *old.shape[3:])
            # copy all columns: a slab may contain more entries than ``lengths`` counts
            new[: self.size, :, : old.shape[2]] = old[: self.size]
            self.slabs[key] = new
        for of_layer in self.states.values():
            for name, old in of_layer.items():
                of_layer[name] = old.new_zeros(slots * self.versions, *old.shape[1:])
                of_layer[name][: len(old)] = old
        self.lengths = np.concatenate([self.lengths, np.zeros(slots - len(self.lengths), np.int64)])
        self.slots, self.width = slots, width

    def add(self, lengths: Sequence[int]) -> np.ndarray:
        """Allocate slots for sequences of ``lengths`` tokens; returns the slot indices."""
        first = self.size
        self.reserve(first + len(lengths), int(max(lengths)))
        self.size += len(lengths)
        self.lengths[first : self.size] = lengths
        return np.arange(first, self.size)

    def remove(self, dead: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Free slots ``dead`` and move the last slots into the gaps; returns (destination, source) slots of the moves."""
        left = self.size - len(dead)
        holes = dead[dead < left]
        alive = np.ones(self.size, bool)
        alive[dead] = False
        movers = np.flatnonzero(alive[left:]) + left
        if len(holes):
            width = int(self.lengths[movers].max())
            indexes: dict[torch.device, tuple[Tensor, Tensor]] = {}
            for slab in self.slabs.values():
                if slab.device not in indexes:
                    indexes[slab.device] = to_device(holes, slab.device), to_device(movers, slab.device)
                to, source = indexes[slab.device]
                slab[:, :, :width].index_copy_(0, to, slab[:, :, :width].index_select(0, source))
            self._move_states(holes, movers)
            self.lengths[holes] = self.lengths[movers]
        self.size = left
        return holes, movers

    def _move_states(self, holes: np.ndarray, movers: np.ndarray) -> None:
        version = np.arange(self.versions)
        to, source = ((slots[:, None] * self.versions + version).ravel() for slots in (holes, movers))
        for of_layer in self.states.values():
            for slab in of_layer.values():
                there, here = to_device(to, slab.device), to_device(source, slab.device)
                slab.index_copy_(0, there, slab.index_select(0, here))


def round_up(value: int, step: int) -> int:
    """Round ``value`` up to a multiple of ``step``."""
    return -(-value // step) * step


class Cache:
    """The KV cache: rows, and the prompts that they share.

    Attributes:
        prefixes: store of the prompts; a live row always has a non-empty prompt.
        own: store of the tokens generated by each row.
        prefix_of: [slots] prompt slot of each row.
        users: [prompt slots] number of rows that continue each prompt.
    """

    def __init__(self) -> None:
        self.prefixes, self.own = Store(), Store(VERSIONS)
        self.prefix_of = np.zeros(_SLOTS, np.int64)
        self.users = np.zeros(_SLOTS, np.int64)
        self._grouped: tuple[tuple[bytes, bytes, torch.device], SharedPrompts] | None = None

    @property
    def rows(self) -> int:
        """Number of live rows."""
        return self.own.size

    def group(self, slots: np.ndarray, device: torch.device) -> SharedPrompts:
        """Return how the rows of ``slots`` share prompts. Most steps have the rows of the step before, so the last result is kept."""
        prompts = self.prefix_of[slots]
        lengths = self.prefixes.lengths[prompts]
        key = (prompts.tobytes(), lengths.tobytes(), device)
        if self._grouped is None or self._grouped[0] != key:
            self._grouped = key, SharedPrompts.of(prompts, lengths, device)
        return self._grouped[1]

    def add_prefixes(self, lengths: Sequence[int]) -> np.ndarray:
        """Allocate slots for prompts of these lengths, without rows or content."""
        slots = self.prefixes.add(lengths)
        self.users = _extend(self.users, self.prefixes.slots)
        self.users[slots] = 0
        return slots

    def add_rows(self, prefixes: Sequence[int]) -> np.ndarray:
        """Allocate slots for rows that continue these prompt slots."""
        slots = self.own.add([0] * len(prefixes))
        self.prefix_of = _extend(self.prefix_of, self.own.slots)
        self.prefix_of[slots] = prefixes
        np.add.at(self.users, np.asarray(prefixes), 1)
        for layer, of_layer in self.prefixes.states.items():
            for key, slab in of_layer.items():
                start, to = (to_device(np.asarray(x), slab.device) for x in (prefixes, slots * VERSIONS))
                self.own.state(layer, key, slab).index_copy_(0, to, slab.index_select(0, start))
        return slots

    def remove_rows(self, dead: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Free rows, and the prompts that no row continues.

        Returns:
            (destination, source) slots of the rows that moved, and (freed, destination, source) slots of the prompts.
        """
        np.subtract.at(self.users, self.prefix_of[dead], 1)
        holes, movers = self.own.remove(dead)
        self.prefix_of[holes] = self.prefix_of[movers]
        gone = np.flatnonzero(self.users[: self.prefixes.size] == 0)
        if not len(gone):
            return holes, movers, (gone, gone, gone)
        where, sources = self.prefixes.remove(gone)
        self.users[where] = self.users[sources]
        renumber = np.arange(self.prefixes.slots)
        renumber[sources] = where
        self.prefix_of[: self.rows] = renumber[self.prefix_of[: self.rows]]
        return holes, movers, (gone, where, sources)

    def own_lengths(self, slots: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Return how many of the first ``lengths`` tokens of each row follow its prompt; ValueError if a length ends inside it."""
        own = np.asarray(lengths, np.int64) - self.prefixes.lengths[self.prefix_of[slots]]
        if (own < 0).any():
            raise ValueError(f"cannot cut rows to {list(lengths)} tokens: a cut would be inside a prompt")
        return own

    def cut(self, slots: np.ndarray, lengths: Sequence[int]) -> None:
        """Drop the tokens of rows after the first ``lengths``; ValueError if a row has fewer or the cut is inside its prompt."""
        own = self.own_lengths(slots, lengths)
        if (own > self.own.lengths[slots]).any():
            raise ValueError(f"cannot cut rows to {list(lengths)} tokens: the cache has fewer")
        if self.own.states and (self.own.lengths[slots] - own >= VERSIONS).any():
            raise ValueError(f"cannot cut rows to {list(lengths)} tokens: the states of its layers after them are gone")
        self.own.lengths[slots] = own

    def pick(self, slots: np.ndarray, front: np.ndarray, counts: np.ndarray, picked: np.ndarray) -> None:
        """Keep selected tokens after the first ``front`` own tokens of each row, and close the gaps.

        Args:
            slots: [rows] row slots.
            front: [rows] number of leading own tokens to keep.
            counts: [rows] number of selected tokens.
            picked: [sum of counts] indices of the selected tokens relative to ``front``, ascending within a row.
        """
        within = np.arange(len(picked)) - np.repeat(counts.cumsum() - counts, counts)
        moved = picked != within
        if moved.any():
            row, start = (np.repeat(x, counts)[moved] for x in (slots, front))
            for slab in self.own.slabs.values():
                where, to, source = (
                    to_device(x, slab.device) for x in (row, start + within[moved], start + picked[moved])
                )
                slab[where, :, to] = slab[where, :, source]
        self.own.lengths[slots] = front + counts


def _extend(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros(max(length - len(values), 0), values.dtype)])


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host index array to ``device`` without waiting for a GPU."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


@dataclass(frozen=True)
class SharedPrompts:
    """Rows stacked by prompt: [groups * members], where every group is padded to the size of the largest.

    Attributes:
        groups, members: number of prompts, and of rows of the prompt with most rows.
        width: length of the longest prompt.
        lengths: [rows] prompt length of each row.
        slots: [groups] slot of each prompt; None if they are the first slots in order.
        gather: [groups * members] row at each place; None if the rows are in this order.
        scatter: [rows] place of each row; None likewise.
        hidden: [rows, 1, width] True for columns after the end of a row's prompt.
    """

    groups: int
    members: int
    width: int
    lengths: np.ndarray
    slots: Tensor | None
    gather: Tensor | None
    scatter: Tensor | None
    hidden: Tensor

    @classmethod
    def of(cls, prompts: np.ndarray, lengths: np.ndarray, device: torch.device) -> SharedPrompts:
        """Group rows by ``prompts`` [rows], the prompt slot of each row; ``lengths`` [rows]."""
        rows = np.arange(len(prompts))
        used, group = np.unique(prompts, return_inverse=True)
        size = np.bincount(group)
        order = np.argsort(group, kind="stable")
        groups, members = len(used), int(size.max())
        place = group[order] * members + rows - np.repeat(size.cumsum() - size, size)
        gather = np.zeros(groups * members, np.int64)
        gather[place] = order
        scatter = np.empty(len(rows), np.int64)
        scatter[order] = place
        straight = len(gather) == len(rows) and bool((gather == rows).all())
        there, back = (None, None) if straight else (to_device(gather, device), to_device(scatter, device))
        slots = None if bool((used == np.arange(groups)).all()) else to_device(used, device)
        hidden = torch.arange(int(lengths.max()), device=device) >= to_device(lengths, device)[:, None, None]
        return cls(groups, members, hidden.shape[-1], lengths, slots, there, back, hidden)


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
        self._prompts = prompts = self.cache.group(self.slots, self.device)
        self.groups, self.members = prompts.groups, prompts.members
        self.prefix_width, self.prefix_lengths = prompts.width, prompts.lengths
        self.prefix_slots, self.gather, self.scatter = prompts.slots, prompts.gather, prompts.scatter

    @cached_property
    def mask(self) -> Tensor:
        """[rows, queries, prefix_width + width] float32, added to scores: 0 where a query attends to a token."""
        if self.parents is None:
            last = to_device(self.before, self.device)[:, None, None]
            queries = torch.arange(self.queries, device=self.device)[:, None]
            own = torch.arange(self.width, device=self.device) > last + queries
        else:
            own = self._tree_hidden(self.parents)
        hidden = torch.cat([self._prompts.hidden.expand(-1, self.queries, -1), own], -1)
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

    @cached_property
    def states(self) -> tuple[Tensor, Tensor]:
        """[rows] where the state of each row in front of the fed token is, and where the one after it is stored."""
        first = self.slots * VERSIONS
        before, after = (to_device(first + n % VERSIONS, self.device) for n in (self.before, self.after))
        return before, after

    def write(self, slab: Tensor, flat: Tensor) -> None:
        """Store the fed tokens' entries [tokens, heads, ...] in ``slab`` of the own store."""
        if self.queries == 1 and self.level and self.dense:
            slab[: self.count, :, int(self.before[0])] = flat
        else:
            slab[self.token_slots, :, self.token_columns] = flat
