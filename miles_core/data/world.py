"""Position of a process among the trainer ranks of a policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One rank of a trainer.

    All ranks of one replica (tensor, pipeline, context parallel) hold parts of the same copy of the model and receive the same
    samples; data-parallel replicas receive different samples.

    Attributes:
        rank: index of this process, from 0.
        size: number of ranks.
        replica: index of this rank's copy of the model, from 0.
        replicas: number of copies of the model.
        sends: whether ``Trainer.units()`` yields weights on this rank. Other ranks consume their empty iterators, and call no engine.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    replicas: int = 1
    sends: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.replica < self.replicas <= self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size} in replica {self.replica} of {self.replicas} is not a valid world: "
                "indexes start at 0, and there are at most as many replicas as ranks"
            )

    def bucket_bytes(self, limit: int) -> int:
        """Return this rank's share of ``limit`` bytes that all ranks of a push send at a time, at least 1 MiB if ``limit`` allows it."""
        return min(limit, max(limit // self.size, 1 << 20))


#: A process that trains alone.
ALONE = World()
