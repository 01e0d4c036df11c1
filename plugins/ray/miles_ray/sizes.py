"""Numbers of processes and devices of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Numbers of processes and devices.

    Attributes:
        nodes: number of machines for the trainer.
        per_node: trainer ranks per machine.
        engines: number of engines.
        per_engine: devices per engine.
        colocate: engines share the trainer's devices.
    """

    nodes: int
    per_node: int
    engines: int
    per_engine: int
    colocate: bool

    @property
    def ranks(self) -> int:
        """Number of trainer ranks, with one device each."""
        return self.nodes * self.per_node

    @property
    def devices(self) -> int:
        """Number of devices of trainer and engines together."""
        return self.ranks + (0 if self.colocate else self.engines * self.per_engine)

    def parts(self, machine: int) -> int:
        """Return the number of equal parts of an engine, each on one machine: 1 if it fits into a machine with ``machine`` devices."""
        parts = -(-self.per_engine // max(machine, 1))
        return next(n for n in range(parts, self.per_engine + 1) if not self.per_engine % n)

    def ranks_of(self, engine: int, part: int, parts: int) -> range:
        """Return the ranks whose devices a part of a colocated engine shares."""
        each = self.per_engine // parts
        start = engine * self.per_engine + part * each
        return range(start, start + each)
