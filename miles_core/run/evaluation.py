"""When the held-out prompts are scored, and what the trainer does meanwhile."""

from __future__ import annotations

import asyncio
import time

from miles_core.contracts.run import Run
from miles_core.rollout.collect import PATIENCE
from miles_core.rollout.evaluate import Evaluator
from miles_core.run.log import RunLog


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
        """The score of the weights that the engine serves, when it is time; nothing where it is found beside the loop."""
        run, interval = self.run, self.run.config.evaluation.interval
        if self.evaluator is None or not interval or run.stop_requested:
            return {}
        if run.step % interval and run.step < run.config.rollout.num_rollout:
            return {}
        if self.beside:
            self._task = asyncio.create_task(self._recorded(self.evaluator, run.step))
            return {}
        self.log.progress.phase("evaluation", total=self.evaluator.count)
        with run.clock.phase("evaluation"):
            found = await self.evaluator()
        self.log.evaluated(run.step, found.samples)
        return found.metrics

    async def done(self) -> None:
        """Wait for an evaluation that runs beside the loop; one that the user stops is given up."""
        if self._task is None:
            return
        with self.run.clock.phase("evaluation"):
            while not self._task.done() and not self.run.stop_requested:
                await asyncio.wait([self._task], timeout=PATIENCE)
        if self._task.done():
            self._task.result()
        await self.close()

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
