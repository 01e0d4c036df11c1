"""The runtime that runs trainer, engine and driver in one process, and rollouts in others on the same machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Producer
from miles_core.run.inline import InlineRuntime
from miles_workers.busy_time import BusyTime
from miles_workers.local_workers import rollout_processes
from miles_workers.output import Output
from miles_workers.restarts import Restarts
from miles_workers.rollout_pool import RolloutPool
from miles_workers.timeouts import Timeouts


class InlineRolloutRuntime(InlineRuntime):
    """``InlineRuntime`` with ``--rollout-workers`` processes."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        options = run.config.run
        self.busy, self.output, self.restarts = BusyTime(), Output(run.directory), Restarts(options.max_restarts)
        timeouts = Timeouts(options.worker_timeout, options.worker_build_timeout, options.worker_heartbeat)
        names = [f"rollout-{number}" for number in range(run.config.rollout.workers or 0)]
        self.rollouts = rollout_processes(run, names, timeouts, self.busy)

    def producer(self, local: Producer, parts: Sequence[PolicyParts]) -> Producer:
        self.output.follow()
        return RolloutPool(self.run, self.rollouts, parts, self.restarts)

    def metrics(self) -> dict[str, float]:
        return self.busy.metrics()

    def activity(self) -> Mapping[str, int]:
        return {name: self.busy.open(name) for name in self.rollouts.names}

    async def close(self) -> None:
        await self.output.close()
        await super().close()
