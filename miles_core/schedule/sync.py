"""``--schedule sync``: rollout and training alternate, and every step trains on samples of the newest weights.

With ``--partial-rollout``, unfinished requests of a collection stay in flight: the engines are paused during training and continue them
under the new weights.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.schedule import Position, Schedule
from miles_core.rollout.collect import Collector, Group
from miles_core.rollout.continuation import partial_rollout
from miles_core.rollout.versions import staleness


@asynccontextmanager
async def pause_engine(run: Run, parts: PolicyParts) -> AsyncIterator[None]:
    """Pause the engine with ``--pause-generation-mode`` during the body. It is resumed only if the body succeeds, because after a failed
    push the engine's weights are incomplete."""
    await parts.serving.pause(run.config.rollout.pause_generation_mode)
    yield
    await parts.serving.resume()


class SyncSchedule(Schedule):
    """Generates the groups of a step when the step requests them.

    - consumes: prompts of the collector, when ``take`` is called.
    - waits: ``take`` until all groups of the step are finished; the engines wait during training and a push.
    - unblocks: training, when the groups are complete; requests in flight (``--partial-rollout``), when the push is complete.
    """

    def __init__(self, run: Run, collector: Collector, parts: Sequence[PolicyParts]) -> None:
        self.run, self.collector, self.parts = run, collector, parts
        self._taken: dict[str, float] = {}

    async def take(self, step: int) -> list[Group]:
        start = time.perf_counter()
        groups = await self.collector.rollout(step)
        self.collector.mark_used()
        self.seconds = time.perf_counter() - start
        if partial_rollout(self.run.config):
            for each in self.parts:
                if each.engine is not None:
                    await each.engine.pause(self.run.config.rollout.pause_generation_mode)
            self._taken = staleness(self.run, [sample for group in groups for sample in group])
        return groups

    @asynccontextmanager
    async def pause_for_push(self, parts: PolicyParts) -> AsyncIterator[None]:
        async with pause_engine(self.run, parts):
            yield

    def metrics(self) -> dict[str, float]:
        return self.collector.metrics() | self._taken

    def state(self) -> Position:
        return self.collector.state()

    def load_state(self, position: Position) -> None:
        self.collector.load_state(position, keep=partial_rollout(self.run.config))

    async def close(self) -> None:
        await self.collector.drop()
