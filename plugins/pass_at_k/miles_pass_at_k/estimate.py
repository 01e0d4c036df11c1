"""Estimators over the samples of a prompt, and intervals over prompts."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence

#: Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959964
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def pass_at(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is right, from c right ones of n >= k: 1 - C(n - c, k) / C(n, k), without bias
    (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at(answers: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Estimate the probability that the most frequent answer of k samples is right: the mean over the disjoint sets of k consecutive samples. The
    answer that occurs first wins a tie; an answer is right if its first sample is."""
    wins = []
    for start in range(0, len(answers) - k + 1, k):
        votes = answers[start : start + k]
        chosen = Counter(votes).most_common(1)[0][0]  # of equally frequent ones the first seen
        wins.append(right[start + votes.index(chosen)])
    return statistics.fmean(wins)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over prompts, and the half-width of its 95 % interval by the normal approximation; None for a single prompt."""
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), Z95 * statistics.stdev(values) / math.sqrt(len(values))


def find_answer(response: str) -> str:
    """Return the answer in a response: the content of the last ``\\boxed{...}``, else the last line that is not empty."""
    if boxed := _BOXED.findall(response):
        return str(boxed[-1]).strip()
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""
