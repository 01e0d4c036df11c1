"""How the samples of a rollout are divided among replicas, and how what these return is put together again."""

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
    """What one replica gets of a rollout.

    Attributes:
        samples: perhaps none, when there are fewer groups than replicas.
        step_of: the optimizer step that each sample belongs to.
        count: optimizer steps, the same for all replicas.
        positions: of the samples in the rollout.
    """

    samples: list[Sample]
    step_of: list[int]
    count: int
    positions: list[int]


def divided(samples: Sequence[Sample], options: TrainOptions, replicas: int) -> list[Share]:
    """One share for each replica: whole groups, and the same number of optimizer steps for all."""
    step_of, count = optimiser_steps(samples, options)
    return [
        Share([samples[i] for i in mine], [step_of[i] for i in mine], count, mine)
        for mine in shares(samples, step_of, replicas)
    ]


def in_order(parts: Sequence[Share], seen: Sequence[Sequence[TrainedTokens]]) -> list[TrainedTokens]:
    """What each replica saw of its share, in the order of the rollout; empty where nothing was recorded."""
    found: dict[int, TrainedTokens] = {}
    for share, tokens in zip(parts, seen, strict=True):
        found |= zip(share.positions, tokens, strict=bool(tokens))
    return [found[at] for at in sorted(found)]


def combined(replicas: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """name -> sum / weight over one rank of each replica; quantities of weight 0 were not measured."""
    totals: dict[str, tuple[float, float]] = {}
    for pairs in replicas:
        add(totals, pairs)
    return means(totals)
