"""Layers that keep a state between tokens (``model.states``), over a packed micro-batch.

A segment of the packing is a sequence: its state starts at zero for a trunk, and for a branch as it is after the last row of its trunk.
Segments of similar length are computed together, padded at the end, where padding has no effect. Trunks with branches are grouped by
equal length, because the states after them would include the padding.

Some modules cannot compute several tokens after a state (``states.continues_sequences``). They compute the trunk again in front of each
branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from miles_core.data.batch import to_device
from miles_embedded.model.states import Advance, LayerStates, continues_sequences
from miles_embedded.trainer.packing import Ints, Packing, Segments
from miles_embedded.trainer.rows import Collect, Spread, group_similar


@dataclass
class StateGroup:
    """Segments that are computed together.

    Attributes:
        segments: number of segments.
        length: the padded length.
        keeps: whether branches continue these segments.
        home: index of the group with the trunks of these branches; -1 for trunks.
        trunk: [segments] index of each branch's trunk within that group; None for trunks.
    """

    segments: int
    length: int
    keeps: bool = False
    home: int = -1
    trunk: Tensor | None = None


class StateGroups:
    """The segments of a packing in groups, each in consecutive slots."""

    def __init__(self, packing: Packing) -> None:
        self._device = packing.rows.device
        self._slots: list[Ints] = []
        self._pads: list[np.ndarray] = []
        self.groups: list[StateGroup] = []
        trunks, branches = packing.trunks, packing.branches
        continued = np.zeros(len(trunks), bool)
        continued[branches.trunk] = True
        alone, ends = np.flatnonzero(~continued), np.flatnonzero(continued)
        for similar in group_similar(trunks.length[alone]):
            self._add(trunks, alone[similar])
        for length in np.unique(trunks.length[ends]):
            chosen = ends[trunks.length[ends] == length]
            home = self._add(trunks, chosen, keeps=True)
            place = np.full(len(trunks), -1, np.int64)
            place[chosen] = np.arange(len(chosen))
            members = np.flatnonzero(place[branches.trunk] >= 0)
            for similar in group_similar(branches.length[members]):
                self._add(branches, members[similar], home=home, place=place)
        slots, pads = np.concatenate(self._slots), np.concatenate(self._pads)
        inverse = np.zeros(len(packing.rows), np.int64)
        inverse[slots[~pads]] = np.flatnonzero(~pads)
        found = (to_device(torch.from_numpy(x), self._device) for x in (slots, inverse, np.flatnonzero(pads)))
        self._slot_rows, self._inverse, self._padding = found

    def _add(
        self, segments: Segments, chosen: Ints, keeps: bool = False, home: int = -1, place: Ints | None = None
    ) -> int:
        """Add a group of the segments ``chosen``; returns its index."""
        lengths = segments.length[chosen]
        # modules take a single token after a state for generation, and modify the state in place, which has no gradient
        longest = max(int(lengths.max()), 1 if place is None else 2)
        within = np.arange(longest)
        padded = within >= lengths[:, None]
        self._slots.append((segments.start[chosen][:, None] + np.where(padded, 0, within)).ravel())
        self._pads.append(padded.ravel())
        trunk = None if place is None else torch.from_numpy(place[segments.trunk[chosen]])
        trunk = None if trunk is None else to_device(trunk, self._device)
        self.groups.append(StateGroup(len(chosen), longest, keeps, home, trunk))
        return len(self.groups) - 1

    def advance(self, module: nn.Module, hidden: Tensor, compute: Advance) -> Tensor:
        """See ``Call.advance``."""
        index, continues = (self._slot_rows, self._inverse, self._padding), continues_sequences(module)
        sizes = [group.segments * group.length for group in self.groups]
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        after: list[LayerStates | None] = []
        for group, rows in zip(self.groups, Spread.apply(hidden[0], *index).split(sizes), strict=True):
            batch = rows.view(group.segments, group.length, -1)
            states = LayerStates() if group.keeps and continues else None
            repeated = 0
            inputs.append(batch)
            if group.trunk is not None and continues:
                states = after[group.home]
                assert states is not None
                states = LayerStates({key: kept.index_select(0, group.trunk) for key, kept in states.kept.items()})
            elif group.trunk is not None:
                trunk = inputs[group.home].index_select(0, group.trunk)
                batch, repeated = torch.cat([trunk, batch], 1), trunk.shape[1]
            outputs.append(compute(batch, states)[:, repeated:].flatten(0, 1))
            after.append(states)
        return Collect.apply(torch.cat(outputs), *index).unsqueeze(0)
