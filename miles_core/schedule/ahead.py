"""``--schedule ahead``: while the trainer learns from one step, the engine generates the next.

A collection uses a single weight version, because the next push waits for it. Every step but the first therefore trains on samples that
are exactly one version old, and runs are reproducible. With ``--partial-rollout``, requests in flight between two collections
continue under the new weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.schedule import Position, Schedule
from miles_core.rollout.collect import Collector, Group, Interrupted
from miles_core.rollout.versions import staleness
from miles_core.schedule.sync import pause_engine
from miles_core.schedule.uncorrected import warn_uncorrected


class AheadSchedule(Schedule):
    """Generates the next step while the trainer learns from this one.

    - consumes: prompts of the collector for step n + 1, as soon as ``take`` has returned the groups of step n.
    - waits: ``take`` for the first groups only; ``pause_for_push`` until the groups of step n + 1 are finished.
    - unblocks: training of step n at once; the collection of step n + 2, when step n + 1 is taken after the push.
    """

    beside = True

    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self.collector = run, collector
        self._next: asyncio.Task[list[Group]] | None = None
        self._held: list[Group] | None = None
        self._taken: dict[str, float] = {}

    async def take(self, step: int) -> list[Group]:
        groups, self._held = self._held, None
        if groups is None:  # the first step, or a step after an interrupted collection
            groups = await self._collect(step)
        self.collector.mark_used()
        self._taken = staleness(self.run, [sample for group in groups for sample in group])
        if step + 1 < self.run.config.rollout.num_rollout:
            self._next = asyncio.create_task(self._collect(step + 1))
        return groups

    @asynccontextmanager
    async def pause_for_push(self, parts: PolicyParts) -> AsyncIterator[None]:
        if self._next is not None:
            collected, self._next = self._next, None
            with suppress(Interrupted):  # the collector has put its prompts back
                self._held = await collected
        async with pause_engine(self.run, parts):
            yield

    def metrics(self) -> dict[str, float]:
        return self.collector.metrics() | self._taken

    def state(self) -> Position:
        position = self.collector.state(self._held or ())
        numbers = [group[0].group_index for group in self._held or ()]
        return replace(position, data={**position.data, "next": numbers}) if numbers else position

    def load_state(self, position: Position) -> None:
        self.collector.load_state(position, keep=True)
        self._held = self.collector.take_out(position.data.get("next", ())) or None

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self.collector.drop()

    async def _collect(self, step: int) -> list[Group]:
        start = time.perf_counter()
        groups = await self.collector.rollout(step)
        self.seconds = time.perf_counter() - start
        return groups


def make_schedule(run: Run, collector: Collector, parts: Sequence[PolicyParts]) -> AheadSchedule:
    """The provider of ``--schedule ahead``."""
    warn_uncorrected(run)
    return AheadSchedule(run, collector)
