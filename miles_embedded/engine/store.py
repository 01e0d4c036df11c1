"""Storage of the cache: slabs of equal slots, for keys and values, recorded fields and the states of layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from miles_embedded.model.states import StateKey

#: Slots, and tokens per slot, of a new store.
SLOTS, _WIDTH = 8, 16
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
        self.slots, self.width = SLOTS, _WIDTH
        self.generation = 0
        self.lengths = np.zeros(SLOTS, np.int64)

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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host index array to ``device`` without waiting for a GPU."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
