"""The profiler of ``--profile``: a trace of one step, and a table of its kernels, launches and idle time.

It is a sink: a step's metrics arrive when the step ends, so the profile covers the time between the first and the second step's metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile

    from miles_core.contracts.run import Run

log = logging.getLogger(__name__)

#: Beginnings of the names of calls that launch work on a GPU.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel", "hipGraphLaunch")
#: Lines of the printed table, and width of its names.
_LINES, _WIDTH = 12, 60


@dataclass(frozen=True)
class Row:
    """Calls of one kernel or operator: their number and their total time in seconds."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What one step did.

    Attributes:
        rows: kernels on a GPU, else operators on the CPU, the longest total time first.
        seconds: duration of the step.
        busy: seconds in which at least one kernel ran; None without a GPU.
        launches: calls that launched kernels or graphs.
    """

    rows: tuple[Row, ...]
    seconds: float
    busy: float | None = None
    launches: int = 0

    def __str__(self) -> str:
        shown = self.rows[:_LINES]
        total = sum(row.seconds for row in self.rows) or 1.0
        lines = [f"{'kernel' if self.busy is not None else 'operator':{_WIDTH}} {'calls':>9} {'ms':>10} {'share':>6}"]
        rest = self.rows[_LINES:]
        if rest:
            shown += (Row(f"{len(rest)} others", sum(r.calls for r in rest), sum(r.seconds for r in rest)),)
        lines += [
            f"{_shorten(r.name):{_WIDTH}} {r.calls:9,} {r.seconds * 1e3:10.2f} {r.seconds / total:6.1%}" for r in shown
        ]
        if self.busy is not None:
            idle = max(self.seconds - self.busy, 0.0)
            lines.append(
                f"GPU busy {self.busy * 1e3:,.1f} ms of {self.seconds * 1e3:,.1f} ms, idle {idle / self.seconds:.1%}; "
                f"{sum(row.calls for row in self.rows):,} kernels in {self.launches:,} launches"
            )
        return "\n".join(lines)


class ProfiledStep:
    """A sink that profiles the second step of a process with ``torch.profiler``; the first one warms up caches.

    It writes ``step_00000002.trace.json`` (for chrome://tracing or ui.perfetto.dev) and ``step_00000002.txt``, the table, to
    ``directory``; the number is that of completed steps. Profiling covers the driver's process.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._profile: profile | None = None
        self._done = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Start the profile after the first step, and write it after the second one."""
        if self._done or "time/step" not in metrics:  # an evaluation before the first step
            return
        if self._profile is None:
            from torch.profiler import profile

            self._profile = profile()  # every activity that this machine supports
            self._profile.start()
            return
        self._profile.stop()
        self._done = True
        self.directory.mkdir(parents=True, exist_ok=True)
        base = self.directory / f"step_{step:08d}"
        self._profile.export_chrome_trace(f"{base}.trace.json")
        summary = summarize(self._profile.events() or (), metrics["time/step"])
        Path(f"{base}.txt").write_text(f"{summary}\n", encoding="utf-8")
        log.info("profile of step %d: %s.txt and %s.trace.json\n%s", step, base, base, summary)

    def close(self) -> None:
        """Warn if no step was profiled."""
        if self._done:
            return
        if self._profile is not None:
            self._profile.stop()
        log.warning("--profile recorded nothing: it profiles the second step of a run, which was not completed")


def make_profiler(run: Run) -> ProfiledStep | None:
    """Make the sink of ``--profile``."""
    options = run.config.run
    return ProfiledStep(options.profile_dir or run.directory / "profile") if options.profile else None


def summarize(events: Iterable[Any], seconds: float) -> Summary:
    """Summarize a profile.

    Args:
        events: ``torch.profiler.profile.events()``.
        seconds: duration of the step.
    """
    from torch._C._autograd import DeviceType

    kernels: dict[str, list[float]] = {}
    operators: dict[str, list[float]] = {}
    spans = []
    launches = 0
    for event in events:
        if event.is_user_annotation:
            continue
        if event.device_type == DeviceType.CPU:
            launches += event.name.startswith(_LAUNCHES)
            operators.setdefault(event.name, []).append(event.self_cpu_time_total * 1e-6)
        else:
            spans.append((event.time_range.start, event.time_range.end))
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() * 1e-6)
    rows = sorted((Row(n, len(t), sum(t)) for n, t in (kernels or operators).items()), key=lambda r: -r.seconds)
    return Summary(tuple(rows), seconds, unite(spans) * 1e-6 if kernels else None, launches)


def unite(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def _shorten(name: str) -> str:
    return name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
