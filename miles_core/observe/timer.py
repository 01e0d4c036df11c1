"""Measures the time of a step's phases, and reports intervals to observers such as tracing sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Accumulates the wall time of named phases between two calls of ``metrics``.

    The time of a nested phase is not counted for the outer phase, so the phases of a step never sum to more than the step. Phases are
    used only in the loop's thread; overlapping work is measured elsewhere and reported with ``add``.

    Args:
        synchronize: called at the start and end of each phase (``torch.cuda.synchronize`` if kernels run asynchronously, so that
            their time is counted for the phase that launched them).

    Attributes:
        created: ``time.perf_counter()`` at creation.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._observers: list[Callable[[str, float, float], None]] = []
        self.created = self._mark = self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as ``time/<name>``."""
        self._switch()
        self._open.append(name)
        start = self._mark
        try:
            yield
        finally:
            self._switch()
            self._open.pop()
            self.record(name, start, self._mark)

    def observe(self, function: Callable[[str, float, float], None]) -> None:
        """Call ``function(name, start, end)`` at the end of every phase and of every interval that ``record`` reports; times are those of
        ``time.perf_counter``. It is called in the thread of the event loop and must not block."""
        self._observers.append(function)

    @property
    def is_observed(self) -> bool:
        """Whether there are observers, to which ``record`` reports."""
        return bool(self._observers)

    def record(self, name: str, start: float, end: float | None = None) -> None:
        """Report an interval to the observers, e.g. a request to an engine; ``end`` is now by default. It counts for no phase, and may
        overlap others."""
        for function in self._observers:
            function(name, start, time.perf_counter() if end is None else end)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to a phase that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def add_waiting(self, elsewhere: Mapping[str, float]) -> None:
        """Move waiting time of the innermost open phase to the phases that used it in another process; ``elsewhere`` maps these to
        seconds."""
        self._switch()
        for name, seconds in elsewhere.items():
            self.add(name, seconds)
            if self._open:
                self.add(self._open[-1], -seconds)

    def metrics(self) -> dict[str, float]:
        """Return ``time/<phase>`` and ``time/step`` in seconds since the last call (or since creation), and reset the clock."""
        self._switch()
        now = self._mark
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._start
        self._seconds = {}
        self._start = now
        return result

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost open phase."""
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        if self._open:
            self.add(self._open[-1], now - self._mark)
        self._mark = now
