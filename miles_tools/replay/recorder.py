"""The sink of ``--record-steps``: writes the samples of each step with everything that training read.

A thread writes while the run continues; the next step waits until the files of the previous one are complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample
from miles_tools.replay.steps import DIRECTORY, delete_steps, measure_steps, write_samples

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

log = logging.getLogger(__name__)


class StepRecorder:
    """Writes ``RUN/steps``, and deletes the oldest steps beyond a total size.

    Args:
        run_dir: the run directory.
        limit: maximum bytes of all recorded steps (``--save-rollouts-size``).
        keeps: False to write nothing, and only delete the files of repeated steps.
    """

    def __init__(self, run_dir: Path, limit: int, keeps: bool) -> None:
        self.run_dir, self.limit, self.keeps = run_dir, limit, keeps
        self._sizes: dict[int, int] = {}
        self._limit_logged = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._pending: Future[None] | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: this sink receives samples only."""

    async def write_samples(
        self, kind: str, step: int, samples: Iterable[tuple[Sample, TrainedTokens | None, str]]
    ) -> None:
        """Start to write the samples that a step trained on; see ``SampleSink``.

        Raises:
            MilesError: the files of the previous step cannot be written.
        """
        if kind != "train" or not self.keeps:
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            await asyncio.shield(asyncio.wrap_future(pending))
        listed = [(sample, trained) for sample, trained, _ in samples]
        self._pending = self._thread.submit(self._write, step, listed)

    def roll_back(self, step: int) -> None:
        """Delete the recorded steps after ``step``, which are repeated."""
        if self._pending is not None:
            self._pending.exception()
        delete_steps(self.run_dir, lambda number: number > step)
        self._sizes = measure_steps(self.run_dir)

    def close(self) -> None:
        """Wait until the last step is complete. Raises MilesError if it cannot be written."""
        pending, self._pending = self._pending, None
        self._thread.shutdown()
        if pending is not None:
            pending.result()

    def _write(self, step: int, listed: list[tuple[Sample, TrainedTokens | None]]) -> None:
        write_samples(self.run_dir, step, [s for s, _ in listed], [t for _, t in listed])
        # the checksums of the engine after the previous step were written after its samples
        self._sizes |= measure_steps(self.run_dir, (step - 1, step))
        excess = sum(self._sizes.values()) - self.limit
        oldest = set()
        for number in sorted(self._sizes.keys() - {step}):
            if excess <= 0:
                break
            oldest.add(number)
            excess -= self._sizes.pop(number)
        if oldest and not self._limit_logged:
            log.info("recorded steps exceed --save-rollouts-size %d: the oldest are deleted", self.limit)
            self._limit_logged = True
        delete_steps(self.run_dir, oldest.__contains__)


def make_recorder(run: Run) -> StepRecorder | None:
    """Make the sink of ``--record-steps``. A run that is resumed without it deletes the files of the steps that it repeats."""
    keeps: bool = run.config.plugin("replay").record_steps
    if not keeps and not (run.directory / DIRECTORY).is_dir():
        return None
    return StepRecorder(run.directory, run.config.run.save_rollouts_size, keeps)
