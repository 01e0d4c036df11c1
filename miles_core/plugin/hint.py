"""Hints: from what a metric does to what usually helps. Plain data, so that a manifest can carry the ones about its plugin.

A hint looks at one metric's values so far; a metric that a run does not have never triggers one. The log and the report of
a run follow core's hints and those of every installed plugin (``miles_core.observe.hints``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

Behaviour = Callable[[Sequence[float]], bool]

#: What core warns of and plugins may help against: engine and trainer disagree; training is unstable.
TROUBLES = ("mismatch", "instability")


def not_finite() -> Behaviour:
    """The last value is NaN or infinite."""
    return lambda values: not math.isfinite(values[-1])


def above(limit: float, steps: int = 3) -> Behaviour:
    """The mean of the last ``steps`` values is over ``limit``; false before there are so many."""
    return lambda values: len(values) >= steps and fmean(values[-steps:]) > limit


def below(limit: float, steps: int = 3) -> Behaviour:
    """The mean of the last ``steps`` values is under ``limit``; false before there are so many."""
    return lambda values: len(values) >= steps and fmean(values[-steps:]) < limit


def jumped(factor: float, steps: int = 20, least: float = 0.0) -> Behaviour:
    """The last value is over ``factor`` times the median of the ``steps`` before it, and over ``least``: what is smaller does no harm."""
    return lambda values: len(values) > steps and values[-1] > max(factor * abs(median(values[-steps - 1 : -1])), least)


def fell(fraction: float, steps: int = 5) -> Behaviour:
    """The mean of the last ``steps`` values is under ``fraction`` of the mean of the first ``steps``."""
    return lambda values: len(values) >= 2 * steps and fmean(values[-steps:]) < fraction * fmean(values[:steps])


def oscillates(swing: float, steps: int = 12) -> Behaviour:
    """Over the last ``steps`` changes the value turned around three times out of four, by ``swing`` on average."""

    def check(values: Sequence[float]) -> bool:
        if len(values) <= steps:
            return False
        changes = [b - a for a, b in pairwise(values[-steps - 1 :])]
        turns = sum(a * b < 0 for a, b in pairwise(changes))
        return turns >= 0.75 * (steps - 1) and fmean(map(abs, changes)) > swing

    return check


@dataclass(frozen=True)
class Hint:
    """When a metric behaves so, this helps.

    Attributes:
        name: identifies the hint; it speaks once a run and metric.
        metric: a metric's name or a glob of names.
        behaviour: what the metric's values so far do (NaN where one was not finite): ``above(2e-3)``, ``jumped(10)``, ...
        seen: what happened, with ``{metric}``, ``{value}`` (the last one), ``{percent}`` (the same of a fraction) and ``{step}``.
        advice: what usually helps, most likely first.
        unless: pairs (metric, behaviour), each of which silences the hint, e.g. a task that is solved.
        when: a condition on the facts of the run (``miles_core.plugin.rule``), e.g. ``"model.moe"``; the hint is silent
            where it is not known to hold.
        trouble: one of ``TROUBLES``, whose remedies are shown after the advice; empty when the advice is complete.
    """

    name: str
    metric: str
    behaviour: Behaviour
    seen: str
    advice: str
    unless: tuple[tuple[str, Behaviour], ...] = ()
    when: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Remedy:
    """What a plugin does against a trouble that core warns of; shown when the plugin is installed, active or not.

    Attributes:
        trouble: one of ``TROUBLES``.
        advice: what to do, with the flag: ``"weigh tokens by importance (--plugins NAME)"``.
        when: as for ``Hint``; ``"not plugin.NAME"`` where being active is the remedy.
    """

    trouble: str
    advice: str
    when: str = ""

    def __post_init__(self) -> None:
        if self.trouble not in TROUBLES:
            raise ValueError(f"there is no trouble {self.trouble!r} to help against; there are {', '.join(TROUBLES)}")
