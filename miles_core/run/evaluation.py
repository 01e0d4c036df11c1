"""When the held-out prompts are scored, and what the trainer does meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TypeVar

from miles_core.checkpoint.directory import run_of
from miles_core.contracts.run import Run
from miles_core.observe.metrics import read
from miles_core.rollout.collect import PATIENCE
from miles_core.rollout.evaluate import Evaluator
from miles_core.run.log import RunLog

T = TypeVar("T")
log = logging.getLogger(__name__)


class Evaluation:
    """Every ``--eval-interval`` steps, before the first and after the last.

    Args:
        run, log: of the run.
        evaluator: scores the held-out prompts; None when there are none.
        beside: run it while the next step is generated and trained. It is then recorded when it is done, under the step whose
            weights it scored, and ``done`` is awaited before those weights change.
    """

    def __init__(self, run: Run, log: RunLog, evaluator: Evaluator | None, beside: bool) -> None:
        self.run, self.log, self.evaluator, self.beside = run, log, evaluator, beside
        self._task: asyncio.Task[None] | None = None

    async def due(self) -> dict[str, float]:
        """The score of the weights that the engine serves, when it is time; nothing where it is found beside the loop, and after a request
        to stop: then the run that goes on makes it up (``missing``)."""
        if self.evaluator is None or not self._is_time() or self.run.stop_requested:
            return {}
        if self.beside:
            self._task = asyncio.create_task(self._recorded(self.evaluator, self.run.step))
            return {}
        self.log.progress.phase("evaluation", total=self.evaluator.count)
        with self.run.clock.phase("evaluation"):
            found = await self._unless_stopped(asyncio.create_task(self.evaluator()))
        if found is None:
            return {}
        self.log.evaluated(self.run.step, found.samples)
        return found.metrics

    async def missing(self, resume_from: Path | None) -> dict[str, float]:
        """``due`` for the weights that a run begins with: those of the start, or of a checkpoint whose run was stopped before it scored
        them."""
        directories = () if resume_from is None else {self.run.directory, run_of(resume_from)}
        return {} if any(_scored(directory, self.run.step) for directory in directories) else await self.due()

    async def complete(self) -> None:
        """Wait for an evaluation that runs beside the loop, also after a request to stop: its weights are about to be replaced."""
        if self._task is not None:
            with self.run.clock.phase("evaluation"):
                await self._task
            self._task = None

    async def done(self) -> None:
        """Wait for an evaluation that runs beside the loop; one that the user stops is given up."""
        if self._task is not None:
            with self.run.clock.phase("evaluation"):
                await self._unless_stopped(self._task)
            self._task = None

    def _is_time(self) -> bool:
        run, interval = self.run, self.run.config.evaluation.interval
        return (
            interval is not None
            and interval > 0
            and (run.step % interval == 0 or run.step >= run.config.rollout.num_rollout)
        )

    async def _unless_stopped(self, task: asyncio.Task[T]) -> T | None:
        """The result of a task; None, and the task is cancelled, when the user asks to stop."""
        try:
            while not task.done() and not self.run.stop_requested:
                await asyncio.wait([task], timeout=PATIENCE)
            if task.done():
                return task.result()
            log.info("the evaluation of step %d is given up; the run that goes on makes it", self.run.step)
            return None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def close(self) -> None:
        """Give up what runs."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _recorded(self, evaluator: Evaluator, step: int) -> None:
        start = time.perf_counter()
        found = await evaluator()
        self.log.evaluated(step, found.samples)
        self.log.record(step, found.metrics | {"time/evaluation": time.perf_counter() - start})


def _scored(directory: Path, step: int) -> bool:
    """Whether the metrics of the run in ``directory`` hold an evaluation of ``step``."""
    return any(r["step"] == step and "eval/reward" in r for r in read(directory / "metrics.jsonl"))
