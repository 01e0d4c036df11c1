"""How many processes and devices a run takes, from its options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Attributes:
    nodes, per_node: machines that train, and ranks on each.
    engines, per_engine: how many generate, and devices of each.
    colocate: engines are on the trainer's devices.
    """

    nodes: int
    per_node: int
    engines: int
    per_engine: int
    colocate: bool

    @property
    def ranks(self) -> int:
        """Trainer ranks, each with a device."""
        return self.nodes * self.per_node

    @property
    def devices(self) -> int:
        """What all of them take together."""
        return self.ranks + (0 if self.colocate else self.engines * self.per_engine)

    def node_of(self, engine: int) -> int:
        """The machine, counted among those that train, that a colocated engine is on."""
        return engine * self.per_engine // self.per_node

    def ranks_of(self, engine: int) -> range:
        """The ranks whose devices a colocated engine shares."""
        return range(engine * self.per_engine, (engine + 1) * self.per_engine)
