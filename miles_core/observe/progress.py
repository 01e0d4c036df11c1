"""The live display of a run, which a standard plugin provides as the part ``progress``."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Progress:
    """Base class of displays, a context manager; shows nothing.

    Args:
        total: number of the last step.
        start: number of completed steps at the start (resume).
    """

    def __init__(self, total: int, start: int = 0) -> None:
        self.total, self.done = total, start

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """End the display."""

    def watch(self, activity: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of calls in flight at each worker."""

    def begin(self) -> None:
        """Start timing the first step; earlier time is not counted."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Start a phase of the step with ``total`` expected items (samples, batches); None if unknown."""

    def advance(self, count: int = 1) -> None:
        """Advance the phase by ``count`` finished items."""

    def step(self, metrics: Mapping[str, float], done: int | None = None) -> None:
        """Show the metrics of a completed step. ``done`` sets the number of completed steps; by default it increases by one."""
        self.done = self.done + 1 if done is None else done
