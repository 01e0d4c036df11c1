"""Populations: the members of each side, and population based training (PBT, Jaderberg et al. 2017, arXiv 1711.09846).

After each round the members of a side are ranked by their mean score. Each of the worst is replaced by a copy of a random member of the best
(exploit: weights, optimizer state and options), whose options are then multiplied or divided by a factor (explore). Random choices depend
only on the run's seed, the side and the round, so that a resumed run makes the same choices.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Options = dict[str, float]


@dataclass(frozen=True)
class Side:
    """The members of one side.

    Attributes:
        name: name of the configured policy from which the side is made; its first member.
        members: names of the policies that learn.
        past: name of the frozen policy that plays past versions; "" without any.
    """

    name: str
    members: tuple[str, ...]
    past: str = ""


@dataclass(frozen=True)
class Replacement:
    """One exploit: ``loser`` becomes a copy of ``winner`` with ``options``."""

    loser: str
    winner: str
    options: Options


def mutate(options: Mapping[str, float], factor: float, draw: random.Random) -> Options:
    """Multiply or divide each value by ``factor``."""
    return {path: value * (factor if draw.random() < 0.5 else 1.0 / factor) for path, value in options.items()}


#: Fraction of a population that is replaced after a round; at least one member is.
FRACTION = 0.25
#: A mutation multiplies or divides a value by this factor.
FACTOR = 1.2


def perturb(options: Mapping[str, float], factor: float, draw: random.Random) -> Options:
    """Draw the options of a further initial member: each value times ``factor`` to a power that is uniform in [-1, 1]."""
    return {path: value * factor ** draw.uniform(-1.0, 1.0) for path, value in options.items()}


def select(
    fitness: Mapping[str, float], options: Mapping[str, Options], fraction: float, factor: float, draw: random.Random
) -> list[Replacement]:
    """Choose the replacements of one round (truncation selection).

    Args:
        fitness: mean score of each member; a member without games is absent and stays.
        options: options of each member.
        fraction: fraction of the members that may be replaced, at least one.
        factor: factor of a mutation.
        draw: random numbers.

    Returns:
        a replacement for each of the worst members whose score is below that of the best member drawn for it.
    """
    ranked = sorted(fitness, key=lambda name: (-fitness[name], name))
    count = min(max(1, round(fraction * len(ranked))), len(ranked) // 2)
    found = []
    for loser in ranked[len(ranked) - count :]:
        winner = draw.choice(ranked[:count])
        if fitness[winner] > fitness[loser]:
            found.append(Replacement(loser, winner, mutate(options[winner], factor, draw)))
    return found


def active_sides(sides: Sequence[Side], step: int, interval: int, alternating: bool) -> tuple[Side, ...]:
    """Return the sides that learn in a step: all of them, or one if they alternate every ``interval`` steps."""
    return (sides[step // interval % len(sides)],) if alternating else tuple(sides)
