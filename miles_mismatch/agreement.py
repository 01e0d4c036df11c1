"""Statistics of two scores of the same tokens, to detect whether two sides compute different functions.

Rounding errors are spread over all tokens and have no direction. A model that computes another function differs by more than rounding
over all tokens, over all tokens after some position, or in proportion to the log-probability. Each case has a separate statistic, built
from medians, so that the few tokens routed to different experts have no influence:

- ``median``: of the absolute differences, over all tokens;
- ``stretch``: the largest such median over ``STRETCH`` consecutive tokens, which detects effects that start at a position (a window,
  other rotary frequencies, a temperature);
- ``slope``: the scale of the engine's log-probabilities relative to the trainer's, minus 1. Logits scaled by s scale them by about s. A
  mean difference hides this effect, because the differences of likely and unlikely tokens have opposite signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Number of consecutive tokens in a stretch.
STRETCH = 32
#: The slope compares these fractions of the tokens with the lowest and the highest log-probabilities of the trainer.
_END = 1 / 3


@dataclass(frozen=True)
class Agreement:
    """Differences between two sides, in nats.

    Attributes:
        tokens: number of compared tokens.
        median: median of the absolute difference.
        stretch: the largest median over ``STRETCH`` consecutive tokens, which start at ``position`` of ``sequence``.
        slope: relative scale of the engine's log-probabilities minus 1; ``slope_error`` is its standard error.
        finite: whether all log-probabilities of both sides are finite.
    """

    tokens: int
    median: float
    stretch: float
    sequence: int
    position: int
    slope: float
    slope_error: float
    finite: bool = True


def compare(engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> Agreement:
    """Compare two scores of the same sequences.

    Args:
        engine, trainer: one array [tokens] of log-probabilities per sequence.

    Returns:
        the statistics, which are infinite if a log-probability is not finite.
    """
    deltas = [np.asarray(e, np.float64) - np.asarray(t, np.float64) for e, t in zip(engine, trainer, strict=True)]
    whole = np.concatenate([np.zeros(0), *deltas])
    if not len(whole):
        return Agreement(0, 0.0, 0.0, 0, 0, 0.0, 0.0)
    if not np.isfinite(whole).all():
        return Agreement(len(whole), math.inf, math.inf, 0, 0, math.inf, 0.0, finite=False)
    stretch, sequence, position = max(_stretches(deltas), key=lambda found: found[0])
    slope, error = _slope(whole, np.concatenate([np.zeros(0), *(np.asarray(t, np.float64) for t in trainer)]))
    return Agreement(len(whole), float(np.median(np.abs(whole))), stretch, sequence, position, slope, error)


def _stretches(deltas: Sequence[np.ndarray]) -> list[tuple[float, int, int]]:
    """Return the median of each stretch of ``STRETCH`` tokens, with its sequence and the position of its first token. A shorter remainder
    is merged with the previous stretch, because the median of a few tokens is not reliable."""
    found = []
    for number, delta in enumerate(deltas):
        starts = list(range(0, max(len(delta) - STRETCH, 0) + 1, STRETCH)) if len(delta) else []
        ends = [*starts[1:], len(delta)]
        found += [
            (float(np.median(np.abs(delta[start:end]))), number, start)
            for start, end in zip(starts, ends, strict=True)
            if end - start >= STRETCH // 2
        ]
    return found or [(float(np.median(np.abs(np.concatenate(deltas)))), 0, 0)]


def _slope(delta: np.ndarray, trainer: np.ndarray) -> tuple[float, float]:
    """Compute the slope and its standard error: the difference of the medians of ``delta`` between the most and the least likely third of
    the tokens, divided by that of the log-probabilities. The standard error of a median is 1.25 sigma / sqrt(n), with sigma from
    the median absolute deviation."""
    order = np.argsort(trainer, kind="stable")
    count = int(len(order) * _END)
    if count < STRETCH // 2:
        return 0.0, math.inf
    low, high = order[:count], order[-count:]
    width = float(np.median(trainer[high]) - np.median(trainer[low]))
    if width < 0.1:  # nats; all tokens are equally likely
        return 0.0, math.inf
    medians = [float(np.median(delta[part])) for part in (low, high)]
    spread = [1.48 * float(np.median(np.abs(delta[part] - m))) for part, m in zip((low, high), medians, strict=True)]
    error = 1.25 * math.hypot(*spread) / math.sqrt(count)
    return (medians[1] - medians[0]) / width, error / width
