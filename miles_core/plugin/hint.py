"""Hints: advice triggered by the behaviour of a metric. Hints are plain data, so that a manifest can contain them.

A hint examines the values of one metric so far; it is never triggered by a metric that the run does not record. The log and the
report of a run show core's hints and those of every installed plugin (``miles_core.observe.hints``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Behaviour = Callable[[Sequence[float]], bool]

#: Problems that core warns about and plugins may offer remedies for: engine and trainer disagree; training is unstable.
TROUBLES = ("mismatch", "instability")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    from statistics import median  # here, because every command imports this module with the manifests

    return median(values)


def not_finite() -> Behaviour:
    """Behaviour: the last value is NaN or infinite."""
    return lambda values: not math.isfinite(values[-1])


def above(limit: float, steps: int = 3) -> Behaviour:
    """Behaviour: the mean of the last ``steps`` values is above ``limit``. False with fewer values."""
    return lambda values: len(values) >= steps and _mean(values[-steps:]) > limit


def below(limit: float, steps: int = 3) -> Behaviour:
    """Behaviour: the mean of the last ``steps`` values is below ``limit``. False with fewer values."""
    return lambda values: len(values) >= steps and _mean(values[-steps:]) < limit


def detect_jump(factor: float, steps: int = 20, least: float = 0.0) -> Behaviour:
    """Behaviour: the last value is above ``least`` and above ``factor`` times the median of the ``steps`` values before it.

    ``least`` excludes values that are too small to matter.
    """
    return lambda values: (
        len(values) > steps and values[-1] > max(factor * abs(_median(values[-steps - 1 : -1])), least)
    )


def detect_fall(fraction: float, steps: int = 5) -> Behaviour:
    """Behaviour: the mean of the last ``steps`` values is below ``fraction`` times the mean of the first ``steps``."""
    return lambda values: len(values) >= 2 * steps and _mean(values[-steps:]) < fraction * _mean(values[:steps])


def detect_growth(factor: float, steps: int = 5) -> Behaviour:
    """Behaviour: the mean of the last ``steps`` values is above ``factor`` times the mean of the first ``steps``."""
    return lambda values: len(values) >= 2 * steps and _mean(values[-steps:]) > factor * _mean(values[:steps])


def detect_rise(steps: int = 5) -> Behaviour:
    """Behaviour: the mean of the last ``steps`` values is above each of the first ``steps``."""
    return lambda values: len(values) >= 2 * steps and _mean(values[-steps:]) > max(values[:steps])


@dataclass(frozen=True)
class Hint:
    """Advice for a behaviour of a metric.

    Attributes:
        name: identifies the hint; it is shown once per run and metric.
        metric: a metric name, or a glob that matches several.
        behaviour: condition on the metric's values so far (NaN for values that were not finite): ``above(2e-3)``, ``detect_jump(10)``.
        seen: description of the observation, with ``{metric}``, ``{value}`` (the last value), ``{percent}`` (the last value as a
            percentage) and ``{step}``.
        advice: what usually helps, most likely first.
        unless: pairs (metric, behaviour), each of which suppresses the hint, e.g. for a solved task.
        when: a condition on the facts of the run (``miles_core.plugin.rule``), e.g. ``"model.moe"``; the hint is shown only if
            the condition is known to hold.
        trouble: one of ``TROUBLES``, whose remedies are shown after the advice; empty if the advice is complete.
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
    """A plugin's remedy for a problem that core warns about. Shown if the plugin is installed, whether or not it is active.

    Attributes:
        trouble: one of ``TROUBLES``.
        advice: what to do, with the flag: ``"weigh tokens by importance (--plugins NAME)"``.
        when: as for ``Hint``; ``"not plugin.NAME"`` if the remedy is to activate the plugin.
    """

    trouble: str
    advice: str
    when: str = ""

    def __post_init__(self) -> None:
        if self.trouble not in TROUBLES:
            raise ValueError(f"there is no trouble {self.trouble!r}; a trouble is one of {', '.join(TROUBLES)}")
