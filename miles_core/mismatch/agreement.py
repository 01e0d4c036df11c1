"""Tests whether the errors of an engine's log-probabilities are rounding errors or indicate that it computes another function.

Both sides are compared with a reference on the same tokens. The errors of the trainer show what rounding does to this model: their size
depends on its weights and not only on its precision, and in a mixture of experts a few tokens that are routed to other experts have large
errors on either side. The engine's errors may be as frequent, and ``RATIO`` times as large, because its kernels round elsewhere:

- over all tokens, and over every stretch of ``STRETCH`` tokens (a window, other rotary frequencies, a temperature that starts at a
  position): the mean of the errors, in which large ones are cut off, must not exceed ``RATIO`` times that of the trainer by more than
  chance explains. Neither must the fraction of the engine's errors beyond ``RATIO`` times a size, for several sizes in the tail of
  the trainer's errors, exceed the fraction of the trainer's errors beyond that size;
- ``slope``: the scale of the engine's log-probabilities relative to the reference, minus 1. Logits scaled by s scale them by about s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_core.mismatch.tolerance import FLOOR, RATIO

#: Number of consecutive tokens in a stretch.
STRETCH = 64
#: Standard errors that count as chance, of the fractions over all tokens, of those of any stretch, and of the slope.
_CHANCE, _CHANCE_OF_ANY, _CHANCE_OF_SLOPE = 4.0, 5.0, 4.0
#: Fractions of the trainer's errors below the sizes at which both sides are compared, and the multiple of the first size at which the mean
#: cuts errors off.
_SIZES, _CUT = (0.9, 0.97, 1.0), 2.0
#: The slope compares these fractions of the tokens with the lowest and the highest log-probabilities of the reference.
_END = 1 / 3
#: Fewest tokens whose errors are compared.
FEWEST = 32
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Errors:
    """Errors of log-probabilities in nats, one array [tokens] per sequence.

    Attributes:
        engine: log-probabilities of the engine minus the reference.
        own: those of the trainer minus the reference.
        scores: the reference.
        floor: size of errors that are never judged.
    """

    engine: Sequence[np.ndarray]
    own: Sequence[np.ndarray]
    scores: Sequence[np.ndarray]
    floor: float = FLOOR

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.engine))

    def __str__(self) -> str:
        sizes = [float(np.sqrt(np.mean(_join(side) ** 2))) for side in (self.engine, self.own)]
        return f"{sizes[0]:.2g} nats (root mean square; {sizes[1]:.2g} of the trainer)"

    def find_excess(self) -> list[str]:
        """Describe errors that rounding does not explain, with the numbers of both sides; [] if there are none."""
        engine, own, scores = map(_join, (self.engine, self.own, self.scores))
        if not len(engine):
            return []
        if not (np.isfinite(engine).all() and np.isfinite(scores).all()):
            return ["some log-probabilities are not finite numbers"]
        larger = find_larger(engine, own, _CHANCE, self.floor) or self._find_stretch()
        found = [larger] if larger else []
        slope, error = _slope(engine, scores)
        allowed = FLOOR + RATIO * abs(_slope(own, scores)[0]) + _CHANCE_OF_SLOPE * error
        if abs(slope) > allowed:
            found.append(
                f"the engine's log-probabilities are {1 + slope:.3f} times as far apart as the reference's (within {allowed:.2g} of 1 "
                "allowed)"
            )
        return found

    def _find_stretch(self) -> str:
        for number, (engine, own) in enumerate(zip(self.engine, self.own, strict=True)):
            starts = range(0, max(len(engine) - STRETCH, 0) + 1, STRETCH // 2)
            for start in starts:
                part = slice(start, None if start == starts[-1] else start + STRETCH)
                if larger := find_larger(engine[part], own[part], _CHANCE_OF_ANY, self.floor):
                    return f"from position {start} of sequence {number} on, {larger}"
        return ""


def compare(
    engine: Sequence[np.ndarray],
    trainer: Sequence[np.ndarray],
    reference: Sequence[np.ndarray] | None = None,
    own: float = 0.0,
    floor: float = FLOOR,
) -> Errors:
    """Make the errors of two sides from their log-probabilities of the same sequences.

    Args:
        engine, trainer: one array [tokens] per sequence.
        reference: the same in a wider type. None takes the trainer as the reference, and errors of the size ``own`` as its own
            (``expected_errors``).
        own: scale of the declared errors in nats.
        floor: size of errors that are never judged.
    """
    sides = [[np.asarray(row, np.float64) for row in side] for side in (engine, trainer, reference or trainer)]
    errors = [[row - right for row, right in zip(side, sides[2], strict=True)] for side in sides[:2]]
    if reference is None:
        errors[1] = [expected_errors(len(row), own) for row in errors[0]]
    return Errors(errors[0], errors[1], sides[2], floor)


def expected_errors(tokens: int, scale: float) -> np.ndarray:
    """Return the quantiles of Student's distribution with two degrees of freedom, [tokens]: errors of the size ``scale`` with a heavy tail
    for the tokens that are routed to other experts. Every stretch of them has quantiles of all sizes. The signs alternate."""
    spread = np.arange(tokens) * _GOLDEN % 1  # multiples of it fill the interval evenly
    u = (spread.argsort().argsort() + 0.5) / max(tokens, 1)
    return scale * u * np.sqrt(2 / (1 - u**2)) * (-1.0) ** np.arange(tokens)


def find_larger(errors: np.ndarray, own: np.ndarray, chance: float, floor: float) -> str:
    """Describe the errors [n] if they are more than ``RATIO`` times as large as ``own`` [m], beyond ``chance`` standard errors; else ""."""
    if min(len(errors), len(own)) < FEWEST:
        return ""
    errors, own = np.abs(errors), np.sort(np.abs(own))
    sizes = [max(float(own[math.ceil(part * len(own)) - 1]), floor / RATIO) for part in _SIZES]
    sides = [np.minimum(side, RATIO * _CUT * sizes[0]) for side in (errors, np.maximum(own, floor / RATIO))]
    mean, other = float(sides[0].mean()), RATIO * float(sides[1].mean())
    deviation = math.sqrt(sides[0].var() / len(errors) + RATIO**2 * sides[1].var() / len(own))
    if mean > other + chance * deviation:
        return (
            f"the engine is wrong by {errors.mean():.2g} nats on average of {len(errors)} tokens, where rounding explains "
            f"{RATIO * np.maximum(own, floor / RATIO).mean():.2g}"
        )
    for size in sizes:
        beyond, expected = float((errors > RATIO * size).mean()), float((own > size).mean())
        both = (beyond * len(errors) + expected * len(own)) / (len(errors) + len(own))
        deviation = math.sqrt(both * (1 - both) * (1 / len(errors) + 1 / len(own)))
        if beyond > expected + chance * deviation and deviation:
            return (
                f"the engine is wrong by more than {RATIO * size:.2g} nats at {beyond:.0%} of {len(errors)} tokens, where rounding explains "
                f"{expected:.0%}"
            )
    return ""


def _join(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *rows])


def _slope(errors: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """Compute the slope and its standard error: the difference of the medians of ``errors`` between the most and the least likely third of
    the tokens, divided by that of the log-probabilities. The standard error of a median is 1.25 sigma / sqrt(n), with sigma from
    the median absolute deviation."""
    order = np.argsort(scores, kind="stable")
    count = int(len(order) * _END)
    if count < FEWEST:
        return 0.0, math.inf
    low, high = order[:count], order[-count:]
    width = float(np.median(scores[high]) - np.median(scores[low]))
    if width < 0.1:  # nats; all tokens are equally likely
        return 0.0, math.inf
    medians = [float(np.median(errors[part])) for part in (low, high)]
    spread = [1.48 * float(np.median(np.abs(errors[part] - m))) for part, m in zip((low, high), medians, strict=True)]
    error = 1.25 * math.hypot(*spread) / math.sqrt(count)
    return (medians[1] - medians[0]) / width, error / width
