"""The sink of ``--record-steps``: writes the samples of each step with everything that training read.

A thread writes while the run continues; the next step waits until the files of the previous one are complete.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_tools.replay.steps import delete_steps, step_directories, write_samples

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
        delete_steps(self.run_dir, step)
        found = step_directories(self.run_dir).items()
        self._sizes = {number: sum(file.stat().st_size for file in path.iterdir()) for number, path in found}

    def close(self) -> None:
        """Wait until the last step is complete. Raises MilesError if it cannot be written."""
        pending, self._pending = self._pending, None
        self._thread.shutdown()
        if pending is not None:
            pending.result()

    def _write(self, step: int, listed: list[tuple[Sample, TrainedTokens | None]]) -> None:
        try:
            size = write_samples(self.run_dir, step, [s for s, _ in listed], [t for _, t in listed])
        except OSError as error:
            raise MilesError(
                f"cannot record step {step} in {self.run_dir}: {error.strerror or error}; free space there and resume the run, or "
                "resume it with --no-record-steps"
            ) from error
        self._sizes[step] = size
        total = sum(self._sizes.values())
        for number in sorted(self._sizes):
            if total <= self.limit or number == step:
                return
            if not self._limit_logged:
                log.info("recorded steps exceed --save-rollouts-size %d: the oldest are deleted", self.limit)
                self._limit_logged = True
            shutil.rmtree(step_directories(self.run_dir)[number], ignore_errors=True)
            total -= self._sizes.pop(number)


def make_recorder(run: Run) -> StepRecorder:
    """Make the sink of ``--record-steps``."""
    keeps = run.config.plugin("replay").record_steps
    return StepRecorder(run.directory, run.config.run.save_rollouts_size, keeps)
