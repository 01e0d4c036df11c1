"""Measures how long workers are busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyTime:
    """Measures the fraction of time during which each worker had a call in flight.

    Args:
        record: receives ``(name, start, end)`` of each such interval, such as ``Clock.record``.
    """

    def __init__(self, record: Callable[[str, float, float], None] | None = None) -> None:
        self._record = record
        self._began: dict[str, float] = {}
        self._open: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Context of a call to a worker; overlapping calls count once."""
        self.add(name, 1)
        try:
            yield
        finally:
            self.add(name, -1)

    def add(self, name: str, change: int) -> None:
        """Change the number of calls in flight at a worker."""
        now = time.perf_counter()
        if not self._open.get(name):
            self._since[name] = self._began[name] = now
        self._open[name] = self._open.get(name, 0) + change
        if not self._open[name]:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since[name]
            if self._record is not None:
                self._record(name, self._began[name], now)

    def open(self, name: str) -> int:
        """Return the number of calls in flight at a worker."""
        return self._open.get(name, 0)

    def metrics(self) -> dict[str, float]:
        """Return ``busy/NAME`` (seconds) and ``idle/NAME`` (fraction of the time) since the last call, and reset the counters."""
        now = time.perf_counter()
        whole = max(now - self._start, 1e-9)
        found: dict[str, float] = {}
        for name, count in self._open.items():
            seconds = self._seconds.get(name, 0.0) + (now - max(self._since[name], self._start) if count else 0.0)
            found |= {f"busy/{name}": seconds, f"idle/{name}": max(0.0, 1 - seconds / whole)}
            self._since[name] = now
        self._seconds, self._start = {}, now
        return found
