"""The key/value cache of many rows that share prompts.

Two stores. ``prefixes`` holds the prompt of each group once, however many rows continue it; ``own`` holds what each row
generated. A store is one slab a layer, [slots, heads, width, dim], that doubles when it is full. Live slots are
always the first ones: when a row leaves, the last row moves into its slot, so a decode step attends to slices of the
slabs and copies nothing. Whatever else belongs to a cached token (recorded fields) is a further slab and follows the
same moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

_SLOTS, _WIDTH = 8, 16


class Store:
    """Slabs of one kind of sequence; ``lengths[:size]`` are the tokens held by each live slot. ``generation`` counts how often a
    slab was made or moved: whoever keeps the address of one looks at it again when the number changes."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, Tensor] = {}
        self.size = 0
        self.slots, self.width = _SLOTS, _WIDTH
        self.generation = 0
        self.lengths = np.zeros(_SLOTS, np.int64)

    def slab(self, key: Hashable, heads: int, tail: Sequence[int], like: Tensor) -> Tensor:
        """The slab ``key``, [slots, heads, width, *tail], made when first asked for. Zeros, because masked entries are
        still multiplied by a weight of zero."""
        found = self.slabs.get(key)
        if found is None:
            self.generation += 1
            found = self.slabs[key] = like.new_zeros(self.slots, heads, self.width, *tail)
        return found

    def reserve(self, slots: int, width: int) -> None:
        """Make room for ``slots`` slots of ``width`` tokens."""
        if slots <= self.slots and width <= self.width:
            return
        slots = self.slots if slots <= self.slots else max(slots, min(2 * self.slots, slots + 256))
        width = self.width if width <= self.width else round_up(max(width, min(2 * self.width, width + 1024)), _WIDTH)
        self.generation += 1
        for key, old in self.slabs.items():
            new = old.new_zeros(slots, old.shape[1], width, *old.shape[3:])
            # all columns: a slab may hold more than ``lengths`` says
            new[: self.size, :, : old.shape[2]] = old[: self.size]
            self.slabs[key] = new
        self.lengths = np.concatenate([self.lengths, np.zeros(slots - len(self.lengths), np.int64)])
        self.slots, self.width = slots, width

    def add(self, lengths: Sequence[int]) -> np.ndarray:
        """Take new slots for sequences that will hold ``lengths`` tokens; returns their numbers."""
        first = self.size
        self.reserve(first + len(lengths), int(max(lengths)))
        self.size += len(lengths)
        self.lengths[first : self.size] = lengths
        return np.arange(first, self.size)

    def remove(self, dead: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Free slots ``dead`` and close the gaps; returns (where, whence) of the slots that moved."""
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
            self.lengths[holes] = self.lengths[movers]
        self.size = left
        return holes, movers


def round_up(value: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-value // step) * step


class Cache:
    """Rows and the prompts they share.

    Attributes:
        prefixes: the prompts; never empty for a live row.
        own: what each row generated so far.
        prefix_of: [rows] slot of each row's prompt.
    """

    def __init__(self) -> None:
        self.prefixes, self.own = Store(), Store()
        self.prefix_of = np.zeros(_SLOTS, np.int64)
        self.users = np.zeros(_SLOTS, np.int64)

    @property
    def rows(self) -> int:
        """Number of live rows."""
        return self.own.size

    def add_prefixes(self, lengths: Sequence[int]) -> np.ndarray:
        """Slots for prompts of these lengths, still without rows and without content."""
        slots = self.prefixes.add(lengths)
        self.users = _extend(self.users, self.prefixes.slots)
        self.users[slots] = 0
        return slots

    def add_rows(self, prefixes: Sequence[int]) -> np.ndarray:
        """Slots for rows that continue these prompts."""
        slots = self.own.add([0] * len(prefixes))
        self.prefix_of = _extend(self.prefix_of, self.own.slots)
        self.prefix_of[slots] = prefixes
        np.add.at(self.users, np.asarray(prefixes), 1)
        return slots

    def remove_rows(self, dead: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Free rows, and the prompts that no row continues any more.

        Returns:
            (where, whence) of the rows that moved, and (dead, where, whence) of the prompts.
        """
        np.subtract.at(self.users, self.prefix_of[dead], 1)
        holes, movers = self.own.remove(dead)
        self.prefix_of[holes] = self.prefix_of[movers]
        gone = np.flatnonzero(self.users[: self.prefixes.size] == 0)
        if not len(gone):
            return holes, movers, (gone, gone, gone)
        where, whence = self.prefixes.remove(gone)
        self.users[where] = self.users[whence]
        renumber = np.arange(self.prefixes.slots)
        renumber[whence] = where
        self.prefix_of[: self.rows] = renumber[self.prefix_of[: self.rows]]
        return holes, movers, (gone, where, whence)

    def own_lengths(self, slots: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Of ``lengths`` tokens of rows, how many are their own; ValueError inside of a prompt."""
        own = np.asarray(lengths, np.int64) - self.prefixes.lengths[self.prefix_of[slots]]
        if (own < 0).any():
            raise ValueError(f"rows cut to {list(lengths)} tokens: that is inside of their prompts")
        return own

    def cut(self, slots: np.ndarray, lengths: Sequence[int]) -> None:
        """Drop what rows hold beyond ``lengths`` tokens; ValueError where they hold fewer, or inside of a prompt."""
        own = self.own_lengths(slots, lengths)
        if (own > self.own.lengths[slots]).any():
            raise ValueError(f"rows cut to {list(lengths)} tokens: the cache holds fewer")
        self.own.lengths[slots] = own

    def pick(self, slots: np.ndarray, front: np.ndarray, counts: np.ndarray, picked: np.ndarray) -> None:
        """Of what rows hold behind their first ``front`` own tokens, keep some, closed up.

        Args:
            slots: [rows].
            front: [rows] own tokens that stay in any case.
            counts: [rows] further tokens that are kept.
            picked: [sum of counts] which, counted from ``front``, ascending within a row.
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

    def tensors(self) -> list[Tensor]:
        """Every slab, to count memory."""
        return [*self.prefixes.slabs.values(), *self.own.slabs.values()]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


def _extend(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros(max(length - len(values), 0), values.dtype)])


def move_items(items: list, where: np.ndarray, whence: np.ndarray, size: int) -> None:
    """Move ``items``, one a slot and each knowing its ``slot``, as their slots moved."""
    for to, source in zip(where.tolist(), whence.tolist(), strict=True):
        items[to] = items[source]
        items[to].slot = to
    del items[size:]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A host index array where the model is; a GPU goes on with its work meanwhile."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
