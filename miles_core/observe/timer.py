"""Where a step's time goes: phases on a clock, and the profiler behind ``--profile``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class Clock:
    """Adds up the wall time of named phases between two calls of ``metrics``.

    A phase inside another one counts for itself only, so the phases of a step never sum to more than the step. Phases
    belong to the thread that runs the loop; work that overlaps it is timed where it happens and given with ``add``.

    Args:
        synchronize: called at the start and end of each phase (``torch.cuda.synchronize`` when kernels run behind
            the host, so that a phase pays for its own kernels).
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
        """Count ``seconds`` for a phase that was timed elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def waited(self, elsewhere: Mapping[str, float]) -> None:
        """Give seconds that the innermost open phase spent waiting to the phases that took them in another process."""
        self._switch()
        for name, seconds in elsewhere.items():
            self.add(name, seconds)
            if self._open:
                self.add(self._open[-1], -seconds)

    def metrics(self) -> dict[str, float]:
        """``time/<phase>`` and ``time/step`` in seconds since the last call (or the clock's making); starts anew."""
        self._switch()
        now = self._mark
        result = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        result["time/step"] = now - self._start
        self._seconds = {}
        self._start = now
        return result

    def _switch(self) -> None:
        """Give the time since the last switch to the innermost open phase."""
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        if self._open:
            self.add(self._open[-1], now - self._mark)
        self._mark = now


class Profiler:
    """Profiles chosen steps with ``torch.profiler``.

    For each one, ``directory`` gets ``step_00000003.trace.json`` (open it in chrome://tracing or ui.perfetto.dev) and
    ``step_00000003.txt``, the operators by their own time.

    Args:
        directory: where the files go.
        first: the first profiled step, counted as the run does: completed steps when it begins. 1 is the second
            step; the one before it warms caches up.
        count: how many steps in a row; 0 turns the profiler off.
    """

    def __init__(self, directory: Path | str, first: int = 1, count: int = 1) -> None:
        self.directory = Path(directory)
        self.steps = range(first, first + count)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wrap one step; does nothing for a step that was not chosen."""
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
