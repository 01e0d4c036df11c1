"""What a run tells: metrics on disk, progress on the screen, hints, an example of every step, profiles."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Runtime
from miles_core.data.sample import Sample
from miles_core.observe.hints import Hints
from miles_core.observe.metrics import MetricLog
from miles_core.observe.progress import Progress
from miles_core.observe.timer import Profiler

log = logging.getLogger(__name__)

#: A sample of every step's first group, for the report.
EXAMPLES = "samples.jsonl"


class RunLog:
    """Where the numbers of a run go.

    Args:
        directory: the run's.
        metrics: the metric log.
        progress: what a person watches.
        hints: what is said about numbers that look wrong.
        profiler: traces of the steps that ``--profile`` asks for.
    """

    def __init__(
        self, directory: Path, metrics: MetricLog, progress: Progress, hints: Hints, profiler: Profiler
    ) -> None:
        self.directory, self.metrics, self.progress = directory, metrics, progress
        self.hints, self.profiler = hints, profiler
        self._runtime: Runtime | None = None

    def watch(self, runtime: Runtime) -> None:
        """Show what the workers of a runtime do, live and in every step's metrics."""
        self._runtime = runtime
        self.progress.watch(runtime.activity)

    def workers(self) -> dict[str, float]:
        """How busy the workers of the runtime were since the last call."""
        return self._runtime.metrics() if self._runtime is not None else {}

    def roll_back(self, step: int) -> None:
        """Forget the metrics of all steps after ``step``: they will be made again."""
        self.metrics.roll_back(step)

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Around one step: profiled where it was asked for; time that no phase claims is ``time/other``."""
        with self.profiler.step(run.step), run.clock.phase("other"):
            yield

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics of ``step`` to the log and show them."""
        finite = self.metrics.append(step, metrics)
        self.progress.step(finite, done=step)
        for hint in self.hints.of(metrics, step):
            log.warning("%s", hint)

    def example(self, step: int, sample: Sample) -> None:
        """Keep one sample of a step, for the report."""
        entry = {
            "step": step,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": sample.reward,
            "status": str(sample.status),
        }
        with (self.directory / EXAMPLES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the metric log."""
        self.metrics.close()
