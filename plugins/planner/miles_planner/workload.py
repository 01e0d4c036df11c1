"""The work of one training step: number and length of the samples, and number of forward passes per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

#: Standard deviation of the logarithm of response lengths: the 99th percentile is about 10 times the median.
SPREAD = 1.0


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        samples: responses per step.
        prompt: mean tokens of a prompt.
        response: mean tokens of a response.
        longest: maximum tokens of a response.
        optimizer_steps: optimizer steps per rollout.
        extra_forwards: forward passes over the batch besides the training pass: reference model, old log-probs.
        lag: steps by which generation may run ahead of training; 0 if they take turns.
    """

    samples: int
    prompt: float
    response: float
    longest: int
    optimizer_steps: int = 1
    extra_forwards: int = 0
    lag: int = 0

    @property
    def tokens(self) -> float:
        """Mean tokens of a sample."""
        return self.prompt + self.response


@lru_cache(maxsize=256)
def response_lengths(mean: float, longest: float, count: int) -> tuple[float, ...]:
    """Return ``count`` response lengths in ascending order: quantiles of a log-normal distribution cut at ``longest``.

    Args:
        mean: mean length after the cut; at most ``longest``.
        longest: maximum length, in tokens.
        count: number of lengths.
    """
    quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    if mean >= 0.98 * longest:
        return (float(longest),) * count

    def cut(location: float) -> list[float]:
        return [min(math.exp(location + SPREAD * q), longest) for q in quantiles]

    low, high = math.log(mean) - 4.0, math.log(longest) + 6.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * count else (low, middle)
    return tuple(cut(high))
