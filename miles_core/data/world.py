"""Position of a process among the trainer ranks of a policy, and the distribution of samples among replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from miles_core.data.sample import Sample

T = TypeVar("T")


def add(into: dict[str, tuple[T, T]], more: Mapping[str, tuple[T, T]]) -> None:
    """Add the pairs of ``more`` to those of ``into`` by name; sums and weights are floats or one-element tensors."""
    pairs: dict[str, tuple[Any, Any]] = into
    for name, (total, weight) in more.items():
        old = pairs.get(name, (0.0, 0.0))
        pairs[name] = (old[0] + total, old[1] + weight)


def as_floats(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Convert (sum, weight) tensors to Python floats. Synchronises with the device."""
    return {name: (float(total), float(weight)) for name, (total, weight) in pairs.items()}


def means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return name -> sum / weight, without entries of weight 0 (not measured)."""
    return {name: total / weight for name, (total, weight) in pairs.items() if weight}


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
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.replica < self.replicas <= self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size} in replica {self.replica} of {self.replicas} is not a valid world: "
                "indexes start at 0, and there are at most as many replicas as ranks"
            )


#: A process that trains alone.
ALONE = World()


def shares(samples: Sequence[Sample], step_of: Sequence[int], replicas: int) -> list[list[int]]:
    """Divide the samples of a rollout among replicas.

    A group stays on one replica, because advantages compare its members. To balance each optimiser step, groups are assigned in
    order of decreasing length to the replica with the fewest tokens in the group's steps (Graham's rule: with one step the largest
    share is at most 4/3 of the optimum).

    Args:
        samples: whole groups.
        step_of: the optimiser step of each sample; a group may extend over two steps.
        replicas: number of replicas; some receive no sample if there are fewer groups.

    Returns:
        for each replica, the indexes of its samples in ascending order.
    """
    members: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault(sample.group_index, []).append(position)
    tokens: dict[int, Counter[int]] = {group: Counter() for group in members}
    for group, positions in members.items():
        for position in positions:
            tokens[group][step_of[position]] += len(samples[position].tokens)
    load = [Counter[int]() for _ in range(replicas)]
    mine: list[list[int]] = [[] for _ in range(replicas)]
    for group in sorted(members, key=lambda g: (min(tokens[g]), -tokens[g].total(), g)):
        # with equal loads, prefer the replica with fewer samples, so that small rollouts reach every replica
        target = min(range(replicas), key=lambda r: (max(load[r][s] for s in tokens[group]), len(mine[r]), r))
        load[target].update(tokens[group])
        mine[target] += members[group]
    return [sorted(positions) for positions in mine]
