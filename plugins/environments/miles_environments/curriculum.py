"""Adapts the difficulty to success: the level rises when most rollouts succeed, and falls when few do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from miles_core.plugin import DataError
from miles_environments.entry import Entry


class Curriculum:
    """The level of one environment.

    Rollouts at the current level are counted, ``window`` of them at a time. If at least ``up`` of the last ``window`` succeeded, the level
    rises by one; if at most ``down`` did, it falls by one. The count starts again after a change.

    Attributes:
        level: the current level, from 0.
    """

    def __init__(self, entry: Entry, levels: int) -> None:
        self.entry, self.levels, self.level = entry, levels, entry.level
        self._results: list[bool] = []

    def update(self, outcomes: Iterable[tuple[int, float]]) -> None:
        """Count rollouts, given as (level, reward) in a fixed order; changes the level at most once."""
        if not self.entry.curriculum:
            return
        self._results += [reward >= self.entry.success for level, reward in outcomes if level == self.level]
        if len(self._results) < self.entry.window:
            return
        last = self._results[-self.entry.window :]
        rate = sum(last) / len(last)
        change = 1 if rate >= self.entry.up else -1 if rate <= self.entry.down else 0
        new = min(max(self.level + change, 0), self.levels - 1)
        self._results = [] if new != self.level else last
        self.level = new

    def state(self) -> dict[str, Any]:
        """Return level and count as JSON."""
        return {"level": self.level, "results": [int(one) for one in self._results]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            DataError: the level does not exist (any more).
        """
        if not 0 <= state["level"] < self.levels:
            raise DataError(
                f"cannot resume: {self.entry.label} was at level {state['level']}, and has {self.levels} levels now; give the same "
                "--environments"
            )
        self.level, self._results = int(state["level"]), [bool(one) for one in state["results"]]
