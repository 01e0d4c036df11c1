"""Splits the samples of a rollout among data-parallel replicas and merges the replicas' results."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.batch import add, means
from miles_core.data.sample import Sample

if TYPE_CHECKING:
    from miles_core.config.groups import Train as TrainOptions


def step_count(samples: int, options: TrainOptions) -> int:
    """Return the number of optimiser steps for a rollout of ``samples`` samples: ``--num-steps-per-rollout``, or the number that
    brings the size of each step closest to ``--global-batch-size``."""
    if options.global_batch_size:
        return max(1, round(samples / options.global_batch_size))
    return options.num_steps_per_rollout or 1


def optimiser_steps(samples: Sequence[Sample], options: TrainOptions) -> tuple[list[int], int]:
    """Assign each sample to an optimiser step.

    Steps are consecutive and as equal in size as possible, and samples with the same rollout id share a step. Call it with all
    samples of the rollout, before they are divided over ranks.

    Returns:
        the step of each sample (from 0), and the number of steps.
    """

    count = step_count(len(samples), options)
    ids = [s.index if s.rollout_id is None else s.rollout_id for s in samples]
    if count == 1 and ids:
        return [0] * len(ids), 1
    place = {rollout: n for n, rollout in enumerate(dict.fromkeys(ids))}
    count = min(count, len(place))
    edges = [round(i * len(place) / count) for i in range(1, count + 1)]
    return [bisect_right(edges, place[i]) for i in ids], count


#: name -> (sum, weight)
Pairs = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class DataShard:
    """One replica's part of a rollout.

    Attributes:
        samples: the replica's samples; empty if there are fewer groups than replicas.
        step_of: index of the optimizer step of each sample.
        count: number of optimizer steps, equal on all replicas.
        positions: index of each sample in the rollout.
        version: version of the trainer's weights.
    """

    samples: list[Sample]
    step_of: list[int]
    count: int
    positions: list[int]
    version: int


def split_by_replica(
    samples: Sequence[Sample], options: TrainOptions, replicas: int, version: int = 0
) -> list[DataShard]:
    """Split samples into one share per replica. Groups stay whole, and all shares have the same number of optimizer steps."""
    step_of, count = optimiser_steps(samples, options)
    return [
        DataShard([samples[i] for i in mine], [step_of[i] for i in mine], count, mine, version)
        for mine in divide_samples(samples, step_of, replicas)
    ]


def divide_samples(samples: Sequence[Sample], step_of: Sequence[int], replicas: int) -> list[list[int]]:
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
            tokens[group][step_of[position]] += samples[position].prompt_length + samples[position].response_length
    load = [Counter[int]() for _ in range(replicas)]
    mine: list[list[int]] = [[] for _ in range(replicas)]
    for group in sorted(members, key=lambda g: (min(tokens[g]), -tokens[g].total(), g)):
        # with equal loads, prefer the replica with fewer samples, so that small rollouts reach every replica
        target = min(range(replicas), key=lambda r: (max(load[r][s] for s in tokens[group]), len(mine[r]), r))
        load[target].update(tokens[group])
        mine[target] += members[group]
    return [sorted(positions) for positions in mine]


def merge_recorded(parts: Sequence[DataShard], seen: Sequence[Sequence[TrainedTokens]]) -> list[TrainedTokens]:
    """Merge the replicas' recorded tokens ``seen`` in the order of the rollout; empty if nothing was recorded."""
    merged: dict[int, TrainedTokens] = {}
    for shard, tokens in zip(parts, seen, strict=True):
        merged |= zip(shard.positions, tokens, strict=bool(tokens))
    return [merged[at] for at in sorted(merged)]


def merge_metrics(replicas: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Merge metrics, name -> (sum, weight), of one rank per replica to name -> sum / weight. Metrics of weight 0 are omitted."""
    totals: dict[str, tuple[float, float]] = {}
    for pairs in replicas:
        add(totals, pairs)
    return means(totals)
