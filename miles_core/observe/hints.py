"""Hints in a run's log and report, which installed plugins define in their manifests."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from miles_core.errors import MismatchError, NonFiniteError
from miles_core.observe.metrics import RESERVED
from miles_core.observe.standard_hints import HINTS
from miles_core.plugin.hint import Hint

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin


def hints_of(plugins: Iterable[Plugin], holds: Callable[[str], bool]) -> tuple[Hint, ...]:
    """Return the hints of a run: core's and those of the installed plugins, each extended with the matching remedies.

    Args:
        plugins: manifests of all installed plugins, active or not.
        holds: condition -> whether it holds in the run (``Plan.holds``).
    """
    plugins = tuple(plugins)
    remedies = [r for plugin in plugins for r in plugin.remedies if holds(r.when)]

    def complete(hint: Hint) -> Hint:
        helps = [r.advice for r in remedies if r.trouble == hint.trouble]
        return replace(hint, advice="; ".join([hint.advice, *helps]))

    hints = (*HINTS, *(hint for plugin in plugins for hint in plugin.hints))
    return tuple(complete(hint) for hint in hints if holds(hint.when))


@dataclass(frozen=True)
class Advice:
    """A hint that was triggered, with the observed step and value."""

    hint: Hint
    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        seen = self.hint.seen.format(
            metric=self.metric, value=f"{self.value:.3g}", percent=f"{self.value:.0%}", step=self.step
        )
        return f"step {self.step}: {seen}; {self.hint.advice}"


class Hints:
    """Evaluates hints during a run; each hint is given once per metric.

    Args:
        known: the hints to evaluate (``hints_of``).
        keep: number of recent values kept per metric, in addition to its first 20.
    """

    def __init__(self, known: Iterable[Hint], keep: int = 200) -> None:
        self.known = tuple(known)
        self._keep = keep
        self._history: dict[str, list[float]] = {}
        self._given: set[tuple[str, str]] = set()
        self._step = 0
        self._names: list[str] = []  # of the last metrics, which are usually those of every step
        self._matching: list[list[str]] = [[] for _ in self.known]  # those that each hint examines

    def of(self, metrics: Mapping[str, Any], step: int | None = None) -> list[Advice]:
        """Add the metrics of ``step`` (default: the step after that of the last call) and return new advice. Non-finite values are
        None or NaN."""
        step = self._step = self._step + 1 if step is None else step
        for name, value in metrics.items():
            if name not in RESERVED:
                past = self._history.setdefault(name, [])
                past.append(math.nan if value is None else float(value))
                if len(past) > self._keep + 20:
                    del past[20]
        if (names := [*metrics]) != self._names:
            self._names = names
            self._matching = [fnmatch.filter(names, hint.metric) for hint in self.known]
        fresh = []
        for hint, matching in zip(self.known, self._matching, strict=True):
            if any(behaviour(self._history.get(metric) or [math.nan]) for metric, behaviour in hint.unless):
                continue
            for name in matching:
                if name in RESERVED or (hint.name, name) in self._given:
                    continue
                if hint.behaviour(self._history[name]):
                    self._given.add((hint.name, name))
                    fresh.append(Advice(hint, name, step, self._history[name][-1]))
        return fresh


def review(records: Iterable[Mapping[str, Any]], known: Iterable[Hint]) -> list[Advice]:
    """Return the advice of all hints for the records of a run, in order of occurrence."""
    hints = Hints(known)
    return [advice for record in records for advice in hints.of(record, record["step"])]


def for_error(error: BaseException, known: Iterable[Hint]) -> str | None:
    """Return advice for an exception, if known: out of memory, non-finite numbers, mismatch of engine and trainer; else None."""
    advice = {hint.name: hint.advice for hint in known}
    for kind, name in ((NonFiniteError, "not-finite"), (MismatchError, "mismatch")):
        if isinstance(error, kind) and name in advice:
            return f"what usually helps: {advice[name]}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "memory ran out: in training lower --max-tokens-per-gpu (or --micro-batch-size) or use --recompute-activations, in the "
            "engine lower --max-running-requests; a smaller --rollout-batch-size and a shorter --rollout-max-response-len help both"
        )
    return None
