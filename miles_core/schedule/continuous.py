"""``--schedule async``: generation never waits for training.

Groups are generated continuously into a buffer, and a step takes the oldest ready groups. With B groups per step and
``--max-weight-staleness N``, at most (N + 1) B groups are in flight or ready before a step takes its groups, and at most N B until the
weights trained on these are served. A group sent now is therefore trained on at most N versions later, in the order of sending.

At a push, requests in flight continue under the new weights (``--partial-rollout``, the default of this schedule). With
``--no-partial-rollout`` they are finished first, each group under its initial version. A response that continues over several pushes
can become older than N versions: its group is then dropped and its prompt sent again, or it is trained on anyway (``--stale-samples``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.schedule import Position, Schedule
from miles_core.rollout.collect import Collector, Group, Interrupted
from miles_core.rollout.continuation import partial_rollout
from miles_core.rollout.versions import age, current_version, staleness
from miles_core.schedule.sync import pause_engine
from miles_core.schedule.uncorrected import warn_uncorrected

log = logging.getLogger(__name__)

#: Default of ``--max-weight-staleness``.
STALENESS = 1


class AsyncSchedule(Schedule):
    """Generates continuously into a buffer bounded by ``--max-weight-staleness``.

    - consumes: prompts of the collector, while fewer groups than the bound are in flight or ready.
    - waits: ``take`` until the oldest groups of a step are ready; generation when the bound is reached; a push until requests are paused, or
      finished with ``--no-partial-rollout``.
    - unblocks: training, when enough groups are ready; generation, when a step takes groups and when their weights are served.
    """

    beside = True

    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self.collector = run, collector
        self.bound = run.config.rollout.max_weight_staleness or STALENESS
        self._generation: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._taken_steps = run.step
        self._learning = self._draining = False
        self._since = time.perf_counter()
        self._dropped = 0
        self._taken: dict[str, float] = {}

    async def take(self, step: int) -> list[Group]:
        if self._generation is None:
            self._taken_steps = step
            self._since = time.perf_counter()
            self._generation = asyncio.create_task(self._generate())
        try:
            groups = await self._oldest(step)
        except Interrupted:
            await self.collector.drop()
            raise
        self.collector.mark_used()
        self._taken_steps, self._learning = step + 1, True
        self._refill()
        self._taken = staleness(self.run, [sample for group in groups for sample in group])
        self._taken["rollout/dropped_groups"], self._dropped = float(self._dropped), 0
        now = time.perf_counter()
        self.seconds, self._since = now - self._since, now
        return groups

    @asynccontextmanager
    async def pause_for_push(self, parts: PolicyParts) -> AsyncIterator[None]:
        if not partial_rollout(self.run.config):
            await self._drained()
        async with pause_engine(self.run, parts):
            yield
        self._learning = self._draining = False
        self._refill()

    def metrics(self) -> dict[str, float]:
        return self.collector.metrics() | self._taken

    def state(self) -> Position:
        return self.collector.state()

    def load_state(self, position: Position) -> None:
        self.collector.load_state(position, keep=True)

    async def close(self) -> None:
        if self._generation is not None:
            self._generation.cancel()
            await asyncio.wait([self._generation])
        await self.collector.drop()

    async def _generate(self) -> None:
        """Keep as many groups in flight as the bound allows, until the user requests a stop or a group fails."""
        try:
            while True:
                self._refill()
                await self.collector.advance()
                self._news.set()
        finally:
            self._news.set()

    def _refill(self) -> None:
        """Send as many groups as the bound allows, but not more than the remaining steps need."""
        ended = self._generation is None or self._generation.done()
        if ended or self._draining or self.run.stop_requested:
            return
        options = self.run.config.rollout
        steps = self.bound if self._learning else self.bound + 1
        self.collector.refill(options.batch_size * min(steps, options.num_rollout - self._taken_steps))

    async def _oldest(self, step: int) -> list[Group]:
        """Wait until enough groups for a step are ready; return the oldest of them."""
        want = self.run.config.rollout.batch_size
        fresh = 0
        while True:
            if self.run.config.rollout.stale_samples == "drop":
                fresh = self._drop_stale(fresh)
            if len(self.collector.ready) >= want:
                return self.collector.pop(want)
            self._refill()
            await self._next_news()

    def _drop_stale(self, fresh: int) -> int:
        """Drop ready groups that are too old to train on, and return the number of the others. The first ``fresh`` groups passed this
        check for the same step; new groups are behind them."""
        ready = self.collector.ready
        is_stale = [self._age(group) > self.bound for _, group in ready[fresh:]]
        stale = [prompt for (prompt, _), old in zip(ready[fresh:], is_stale, strict=True) if old]
        ready[fresh:] = [item for item, old in zip(ready[fresh:], is_stale, strict=True) if not old]
        self.collector.prompts.put_back(stale)
        self._dropped += len(stale)
        return len(ready)

    def _age(self, group: Group) -> int:
        return max(age(sample, current_version(self.run, sample)) for sample in group)

    async def _drained(self) -> None:
        """Wait for the groups in flight; after a stop request, drop them."""
        self._draining = True
        try:
            while self.collector.pending:
                await self._next_news()
        except Interrupted:
            await self.collector.drop()

    async def _next_news(self) -> None:
        """Wait until a group finishes; raise the error that ended the generation, if any."""
        if self._generation is not None and self._generation.done():
            await self._generation
        await self._news.wait()
        self._news.clear()


def make_schedule(run: Run, collector: Collector, parts: Sequence[PolicyParts]) -> AsyncSchedule:
    """The provider of ``--schedule async``."""
    warn_uncorrected(run)
    if not partial_rollout(run.config):
        log.warning(
            "--schedule async with --no-partial-rollout waits for the longest response in flight before every push, and is then "
            "no faster than --schedule ahead"
        )
    return AsyncSchedule(run, collector)
