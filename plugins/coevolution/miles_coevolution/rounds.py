"""Scores of the games of a step and of a round."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from miles_coevolution.game import ENTRY
from miles_core.data import Sample

#: Phases in which a cycle is looked for.
CYCLE = 6


def seeded(seed: int, *what: object) -> random.Random:
    """Random numbers that depend on the run's seed and on a name only."""
    return random.Random("/".join(map(str, (seed, *what))))


class Tally:
    """Sums and counts by name, as JSON for checkpoints."""

    def __init__(self, data: dict[str, list[float]] | None = None) -> None:
        self.data = data or {}

    def add(self, name: str, values: Iterable[float]) -> None:
        """Count values under a name."""
        for value in values:
            total, count = self.data.get(name, (0.0, 0.0))
            self.data[name] = [total + value, count + 1.0]

    def means(self) -> dict[str, float]:
        """Name -> mean."""
        return {name: total / count for name, (total, count) in self.data.items()}


def outcomes(samples: Sequence[Sample], what: str, past: bool | None = None) -> list[float]:
    """Return the scores or wins of samples. ``past``: only games with (True) or without (False) a past version; None for all."""
    entries = [sample.metadata[ENTRY] for sample in samples if ENTRY in sample.metadata]
    return [float(entry[what]) for entry in entries if past is None or entry["past"] == past]


def swing(means: Sequence[float]) -> float:
    """Return the mean absolute change of the mean wins from phase to phase if the wins cycle, else 0.

    They cycle if at least three quarters of the changes have the opposite sign of the change before."""
    recent = list(means)[-CYCLE - 1 :]
    changes = [b - a for a, b in pairwise(recent)]
    if len(changes) < CYCLE:
        return 0.0
    turns = sum(a * b < 0 for a, b in pairwise(changes))
    return fmean(map(abs, changes)) if turns >= 0.75 * (len(changes) - 1) else 0.0
