"""Measures the time of a step's phases, and implements the profiler of ``--profile``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class Clock:
    """Accumulates the wall time of named phases between two calls of ``metrics``.

    The time of a nested phase is not counted for the outer phase, so the phases of a step never sum to more than the step. Phases are
    used only in the loop's thread; overlapping work is measured elsewhere and reported with ``add``.

    Args:
        synchronize: called at the start and end of each phase (``torch.cuda.synchronize`` if kernels run asynchronously, so that
            their time is counted for the phase that launched them).
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as ``time/<name>``."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

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


class Profiler:
    """Profiles chosen steps with ``torch.profiler``.

    For each step it writes ``step_00000003.trace.json`` (for chrome://tracing or ui.perfetto.dev) and ``step_00000003.txt``, the
    operators sorted by self time, to ``directory``.

    Args:
        directory: output directory.
        first: the first profiled step, as the number of completed steps at its start. 1 is the second step; the first step warms up
            caches.
        count: number of consecutive steps; 0 disables the profiler.
    """

    def __init__(self, directory: Path | str, first: int = 1, count: int = 1) -> None:
        self.directory = Path(directory)
        self.steps = range(first, first + count)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of one step: profile it if it is selected."""

        if step not in self.steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        order = "self_cpu_time_total"
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            order = "self_device_time_total"
        with profile(activities=activities) as profiled:
            yield
        self.directory.mkdir(parents=True, exist_ok=True)
        base = self.directory / f"step_{step:08d}"
        profiled.export_chrome_trace(f"{base}.trace.json")
        table = profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
        Path(f"{base}.txt").write_text(table + "\n", encoding="utf-8")
        log.info("profile of step %d: %s.txt and %s.trace.json", step, base, base)
