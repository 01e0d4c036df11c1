"""Schedules evaluations, in sequence with the training loop or concurrently."""

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
    """Evaluates every ``--eval-interval`` steps, before the first step and after the last.

    Args:
        run, log: the run and its log.
        evaluator: scores the held-out prompts; None if there are none.
        concurrent: evaluate while the next step is generated and trained. The result is then recorded on completion, under the step
            of the evaluated weights, and the loop awaits ``complete`` before it changes these weights.
    """

    def __init__(self, run: Run, log: RunLog, evaluator: Evaluator | None, concurrent: bool) -> None:
        self.run, self.log, self.evaluator, self.concurrent = run, log, evaluator, concurrent
        self._task: asyncio.Task[None] | None = None

    async def run_if_due(self) -> dict[str, float]:
        """Evaluate the engine's current weights if an evaluation is due, and return the metrics.

        Returns an empty dict if the evaluation runs concurrently, or after a stop request; then the resumed run makes up for the
        evaluation (``run_if_missing``).
        """
        if self.evaluator is None or not self._is_time() or self.run.stop_requested:
            return {}
        if self.concurrent:
            self._task = asyncio.create_task(self._evaluate_and_record(self.evaluator, self.run.step))
            return {}
        self.log.progress.phase("evaluation", total=self.evaluator.count)
        with self.run.clock.phase("evaluation"):
            result = await self._await_unless_stopped(asyncio.create_task(self.evaluator()))
        if result is None:
            return {}
        await self.log.record_evaluated(self.run.step, result.samples)
        return result.metrics

    async def run_if_missing(self, resume_from: Path | None) -> dict[str, float]:
        """Evaluate the initial weights of the run if an evaluation is due, unless the run of the checkpoint ``resume_from`` has
        already evaluated them."""
        directories = () if resume_from is None else {self.run.directory, run_of(resume_from)}
        return (
            {}
            if any(has_evaluation(directory, self.run.step) for directory in directories)
            else await self.run_if_due()
        )

    async def complete(self) -> None:
        """Wait for a concurrent evaluation, even after a stop request, because its weights are about to be replaced."""
        if self._task is not None:
            with self.run.clock.phase("evaluation"):
                await self._task
            self._task = None

    async def complete_unless_stopped(self) -> None:
        """Wait for a concurrent evaluation; cancel it if the user requests a stop."""
        if self._task is not None:
            with self.run.clock.phase("evaluation"):
                await self._await_unless_stopped(self._task)
            self._task = None

    def _is_time(self) -> bool:
        run, interval = self.run, self.run.config.evaluation.interval
        return (
            interval is not None
            and interval > 0
            and (run.step % interval == 0 or run.step >= run.config.rollout.num_rollout)
        )

    async def _await_unless_stopped(self, task: asyncio.Task[T]) -> T | None:
        """Return the result of a task. If the user requests a stop, cancel the task and return None."""
        try:
            while not task.done() and not self.run.stop_requested:
                await asyncio.wait([task], timeout=PATIENCE)
            if task.done():
                return task.result()
            log.info("the evaluation of step %d was cancelled; the resumed run repeats it", self.run.step)
            return None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def close(self) -> None:
        """Cancel a running evaluation."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _evaluate_and_record(self, evaluator: Evaluator, step: int) -> None:
        start = time.perf_counter()
        result = await evaluator()
        await self.log.record_evaluated(step, result.samples)
        self.log.record(step, result.metrics | {"time/evaluation": time.perf_counter() - start})


def has_evaluation(directory: Path, step: int) -> bool:
    """Return whether the metrics of the run in ``directory`` contain an evaluation of ``step``."""
    return any(r["step"] == step and "eval/reward" in r for r in read(directory / "metrics.jsonl"))
