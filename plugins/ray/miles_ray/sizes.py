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

    def node_of(self, engine: int) -> int:
        """Return the index of the trainer machine on which a colocated engine runs."""
        return engine * self.per_engine // self.per_node

    def ranks_of(self, engine: int) -> range:
        """Return the ranks whose devices a colocated engine shares."""
        return range(engine * self.per_engine, (engine + 1) * self.per_engine)
