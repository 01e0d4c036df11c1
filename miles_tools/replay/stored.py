"""Runs of one half of the loop: training on recorded samples (``--schedule stored``), or rollouts without training."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Learned, PolicyParts
from miles_core.contracts.schedule import Position, Schedule
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.plugin.marker import hookimpl
from miles_tools.replay.open_run import open_source
from miles_tools.replay.steps import read_samples

if TYPE_CHECKING:
    from miles_core.contracts.run import Policy
    from miles_core.contracts.runtime import Learn
    from miles_core.rollout.collect import Collector

log = logging.getLogger(__name__)


class TrainOnly:
    """The hooks of ``--debug-train-only``."""

    @hookimpl
    def on_start(self, run: Run) -> None:
        for policy in run.policies:
            policy.generates = False


class RolloutOnly:
    """The hooks of ``--debug-rollout-only``."""

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy) -> Any:
        def wrap(inner: Learn) -> Learn:
            async def skip(samples: Sequence[Sample], step: int) -> Learned:
                return Learned({}, 0)

            return skip

        return wrap


class StoredSchedule(Schedule):
    """Takes the samples of the recorded steps of another run, until the last one. Policies of such a run have no engines.

    - consumes: files of ``--load-debug-rollout-data``.
    - waits: for nothing; there is no engine.
    - unblocks: training, when the samples are read.
    """

    generates = False

    def __init__(self, run: Run, collector: Collector) -> None:
        self.run, self.collector = run, collector
        self.source, self.last = open_source(run.config.plugin("replay"))

    async def take(self, step: int) -> list[list[Sample]]:
        if step >= self.last:
            raise MilesError(
                f"--load-debug-rollout-data {self.source}: {step} steps are complete and the last one to train is {self.last}; nothing "
                "is left to do"
            )
        groups: dict[int, list[Sample]] = {}
        for sample in read_samples(self.source, step + 1):
            groups.setdefault(sample.group_index, []).append(sample)
        for policy in self.run.policies:
            policy.version = step  # as if the weights had been pushed
        if step + 1 == self.last:
            log.info("step %d is the last one to train on recorded samples", self.last)
            self.run.stop_requested = True
        return [*groups.values()]

    @asynccontextmanager
    async def pause_for_push(self, parts: PolicyParts) -> AsyncIterator[None]:
        yield

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Position:
        return self.collector.state()

    def load_state(self, position: Position) -> None:
        self.collector.load_state(position)

    async def close(self) -> None:
        """Nothing is in flight."""
