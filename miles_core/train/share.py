"""Splits the samples of a rollout among data-parallel replicas and merges the replicas' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.means import add, means
from miles_core.data.sample import Sample
from miles_core.data.world import shares
from miles_core.train.steps import optimiser_steps

if TYPE_CHECKING:
    from miles_core.config.groups import Train as TrainOptions

#: name -> (sum, weight)
Pairs = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Share:
    """One replica's part of a rollout.

    Attributes:
        samples: the replica's samples; empty if there are fewer groups than replicas.
        step_of: index of the optimizer step of each sample.
        count: number of optimizer steps, equal on all replicas.
        positions: index of each sample in the rollout.
    """

    samples: list[Sample]
    step_of: list[int]
    count: int
    positions: list[int]


def split_by_replica(samples: Sequence[Sample], options: TrainOptions, replicas: int) -> list[Share]:
    """Split samples into one share per replica. Groups stay whole, and all shares have the same number of optimizer steps."""
    step_of, count = optimiser_steps(samples, options)
    return [
        Share([samples[i] for i in mine], [step_of[i] for i in mine], count, mine)
        for mine in shares(samples, step_of, replicas)
    ]


def merge_recorded(parts: Sequence[Share], seen: Sequence[Sequence[TrainedTokens]]) -> list[TrainedTokens]:
    """Merge the replicas' recorded tokens ``seen`` in the order of the rollout; empty if nothing was recorded."""
    merged: dict[int, TrainedTokens] = {}
    for share, tokens in zip(parts, seen, strict=True):
        merged |= zip(share.positions, tokens, strict=bool(tokens))
    return [merged[at] for at in sorted(merged)]


def merge_metrics(replicas: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Merge metrics, name -> (sum, weight), of one rank per replica to name -> sum / weight. Metrics of weight 0 are omitted."""
    totals: dict[str, tuple[float, float]] = {}
    for pairs in replicas:
        add(totals, pairs)
    return means(totals)
