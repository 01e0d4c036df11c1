"""Do two sides compute one function? Statistics of two scores of the same tokens.

Rounding spreads over all tokens and has no direction. A model that computes something else differs by more than that over all tokens, over
the tokens behind some position, or in proportion to the log-probability. Each of these has a statistic of its own, built from medians
so that the few tokens whose expert a router changed do not count:

- ``median``: of the absolute differences, over all tokens;
- ``stretch``: the largest such median over ``STRETCH`` consecutive tokens, which shows what begins at a position (a window, other
  rotary frequencies, a temperature);
- ``slope``: how much the engine's log-probabilities are stretched relative to the trainer's, minus 1. Logits that are scaled by s stretch
  them by about s. A mean difference hides this, because likely tokens lose what unlikely ones gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Consecutive tokens that are judged together.
STRETCH = 32
#: The slope compares this part of the tokens at either end of the trainer's log-probabilities.
_END = 1 / 3


@dataclass(frozen=True)
class Agreement:
    """How far two sides are apart, in nats.

    Attributes:
        tokens: how many were compared.
        median: of the absolute difference.
        stretch: the largest median over ``STRETCH`` consecutive tokens of a sequence; ``sequence`` and ``position`` say where it begins.
        slope: relative stretch of the engine's log-probabilities, 0 for none; ``slope_error`` is its standard error.
        finite: whether all log-probabilities of both sides are finite numbers.
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
        the statistics; with numbers that are not finite they are infinite.
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
    """The median of each run of ``STRETCH`` tokens, with its sequence and the position of its first token. A shorter rest belongs to
    the run before it, because the median of a few tokens is no statistic."""
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
    """Difference of the medians of ``delta`` between the likeliest and the least likely third of the tokens, over that of the
    log-probabilities, and its standard error (of a median: 1.25 sigma / sqrt(n), sigma from the median absolute deviation)."""
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
