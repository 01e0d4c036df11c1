"""Output of a run: metrics and samples on disk, progress on the screen, hints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol, runtime_checkable

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Runtime, TrainedTokens
from miles_core.data.sample import Sample
from miles_core.observe.hints import Hints
from miles_core.observe.metrics import MetricLog, Sink
from miles_core.observe.progress import Progress

log = logging.getLogger(__name__)

#: The samples of a step, with the recorded training values of each.
TrainedSamples = list[tuple[Sample, TrainedTokens | None]]


@runtime_checkable
class SampleSink(Sink, Protocol):
    """A sink that also receives samples."""

    async def write_samples(
        self, kind: str, step: int, samples: Iterable[tuple[Sample, TrainedTokens | None, str]]
    ) -> None:
        """Store the samples that ``step`` trained on (kind ``train``), or the evaluation samples after it (``eval``).

        Each comes with the values recorded in training, if any, and the name of its evaluation set. Samples may be stored after the
        call returns; an error is then raised by a later call or by ``close``.
        """

    def roll_back(self, step: int) -> None:
        """Delete the samples of all steps after ``step``."""


@runtime_checkable
class HintSink(Sink, Protocol):
    """A sink that also receives hints."""

    def write_hint(self, step: int, hint: str) -> None:
        """Receive a hint, the line that the log shows. Must not block."""


class RunLog:
    """Distributes the metrics and samples of a run to their outputs.

    Args:
        metrics: the metric log, whose sinks may also receive samples.
        progress: live display.
        hints: warns about suspicious metrics.
    """

    def __init__(self, metrics: MetricLog, progress: Progress, hints: Hints) -> None:
        self.metrics, self.progress = metrics, progress
        self.sample_sinks = [sink for sink in metrics.sinks if isinstance(sink, SampleSink)]
        self.hint_sinks = [sink for sink in metrics.sinks if isinstance(sink, HintSink)]
        self.hints = hints
        self._runtime: Runtime | None = None

    def watch(self, runtime: Runtime) -> None:
        """Show the activity of the runtime's workers on the live display and in the metrics of every step."""
        self._runtime = runtime
        self.progress.watch(runtime.activity)

    def workers(self) -> dict[str, float]:
        """Return the runtime's metrics of worker utilisation since the last call."""
        return self._runtime.metrics() if self._runtime is not None else {}

    def roll_back(self, step: int) -> None:
        """Delete the metrics and samples of all steps after ``step``, because these steps are repeated."""
        self.metrics.roll_back(step)
        for sink in self.sample_sinks:
            sink.roll_back(step)

    def begin(self, run: Run) -> None:
        """Start timing the first step, if any remains, and log how long the start of the run took, with the latest phases."""
        self.workers()
        phases = run.clock.metrics()
        del phases["time/step"]
        parts = ", ".join(f"{name.removeprefix('time/')} {seconds:.1f} s" for name, seconds in phases.items())
        more = run.step < run.config.rollout.num_rollout
        what = f"step {run.step + 1} begins" if more else f"no step follows step {run.step}; ready"
        log.info("%s %.1f s after the start: %s", what, perf_counter() - run.clock.created, parts)
        self.progress.begin()

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Context of one step: counts time outside all phases as ``time/other``."""
        with run.clock.phase("other"):
            yield

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics of ``step`` to the log and show them."""
        finite = self.metrics.append(step, metrics)
        self.progress.step(finite, done=step)
        for hint in self.hints.of(metrics, step):
            log.warning("%s", hint)
            for sink in self.hint_sinks:
                sink.write_hint(step, str(hint))

    async def record_trained(self, step: int, samples: TrainedSamples) -> None:
        """Store the samples that ``step`` trained on."""
        for sink in self.sample_sinks:
            await sink.write_samples("train", step, ((sample, tokens, "") for sample, tokens in samples))

    async def record_evaluated(self, step: int, sets: Mapping[str, Sequence[Sample]]) -> None:
        """Store the evaluation samples of the weights after ``step``; ``sets`` maps data sets to samples."""
        for sink in self.sample_sinks:
            await sink.write_samples("eval", step, ((s, None, name) for name, samples in sets.items() for s in samples))

    def close(self) -> None:
        """Close the metric log and its sinks."""
        self.metrics.close()
