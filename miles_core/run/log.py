"""What a run tells: metrics and samples on disk, progress on the screen, hints, profiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Runtime, TrainedTokens
from miles_core.data.sample import Sample
from miles_core.observe.hints import Hints
from miles_core.observe.metrics import MetricLog
from miles_core.observe.progress import Progress
from miles_core.observe.timer import Profiler
from miles_core.run.rollouts import RolloutFiles

log = logging.getLogger(__name__)

#: The samples of a step, each with what training saw of it.
Kept = list[tuple[Sample, TrainedTokens | None]]


class RunLog:
    """Where the numbers of a run go.

    Args:
        metrics: the metric log.
        progress: what a person watches.
        hints: what is said about numbers that look wrong.
        profiler: traces of the steps that ``--profile`` asks for.
        rollouts: where samples are kept; None with ``--no-save-rollouts``.
    """

    def __init__(
        self, metrics: MetricLog, progress: Progress, hints: Hints, profiler: Profiler, rollouts: RolloutFiles | None
    ) -> None:
        self.metrics, self.progress, self.rollouts = metrics, progress, rollouts
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
        """Forget the metrics and samples of all steps after ``step``: they will be made again."""
        self.metrics.roll_back(step)
        if self.rollouts is not None:
            self.rollouts.roll_back(step)

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

    def trained(self, step: int, samples: Kept) -> None:
        """Keep the samples that ``step`` trained on."""
        if self.rollouts is not None:
            files = self.rollouts
            files.write("train", step, (files.row(sample, tokens) for sample, tokens in samples))

    def evaluated(self, step: int, sets: Mapping[str, Sequence[Sample]]) -> None:
        """Keep the answers to held-out prompts, by data set, of the weights after ``step``."""
        if self.rollouts is not None:
            files = self.rollouts
            files.write("eval", step, (files.row(s, data_set=name) for name, found in sets.items() for s in found))

    def close(self) -> None:
        """Close the metric log."""
        self.metrics.close()
