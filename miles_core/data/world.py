"""Where a process stands among those that train one policy, and how samples are shared among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.data.sample import Sample


@dataclass(frozen=True)
class World:
    """One rank of a trainer.

    All ranks of one replica (tensor, pipeline, context parallel) hold parts of one copy of the model and are given the
    same samples; replicas (data parallel) are given different ones.

    Attributes:
        rank: this process's number, from 0.
        size: how many ranks there are.
        replica: the copy of the model this rank belongs to, from 0.
        replicas: how many copies there are.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.replica < self.replicas <= self.size):
            raise ValueError(
                f"rank {self.rank} of {self.size} in replica {self.replica} of {self.replicas} is no place in a world: "
                "numbers start at 0, and there are no more replicas than ranks"
            )


#: A process that trains alone.
ALONE = World()


def shares(samples: Sequence[Sample], step_of: Sequence[int], replicas: int) -> list[list[int]]:
    """Divide the samples of a rollout among replicas.

    A group stays on one replica, because advantages compare its members. Replicas should be done with each optimiser step at
    about the same time: groups go, the longest first, to the replica that has the fewest tokens in the steps they belong to
    (Graham's rule: with one step the largest share is at most 4/3 of the best possible one).

    Args:
        samples: whole groups.
        step_of: the optimiser step each sample belongs to; a group may reach into two.
        replicas: how many there are; some get no sample where there are fewer groups.

    Returns:
        for each replica the positions of its samples, in their order.
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
        # with equal loads the replica with fewer samples in all, so that small rollouts reach every replica
        target = min(range(replicas), key=lambda r: (max(load[r][s] for s in tokens[group]), len(mine[r]), r))
        load[target].update(tokens[group])
        mine[target] += members[group]
    return [sorted(positions) for positions in mine]
