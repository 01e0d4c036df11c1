"""Workers in other processes of the driver's machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from miles_core.contracts.run import Run
from miles_workers.busy_time import BusyTime
from miles_workers.local_channel import raise_file_limit
from miles_workers.local_process import LocalProcess, ProcessEnded, uses_cpu
from miles_workers.output import last_lines
from miles_workers.timeouts import Timeouts
from miles_workers.worker import WorkerSpec
from miles_workers.workers import Workers


def rollout_processes(run: Run, names: Sequence[str], timeouts: Timeouts, busy: BusyTime) -> LocalWorkers:
    """Return the handle to rollout workers on this machine, which are not started."""
    raise_file_limit()
    kind, level = "miles_workers.rollout_worker:RolloutWorker", run.config.run.log_level
    return LocalWorkers(kind, names, WorkerSpec.of(run), run.policy.name, level, timeouts=timeouts, busy=busy)


class LocalWorkers(Workers):
    """Processes on this machine.

    Args:
        kind: ``module:class`` of the ``Worker``.
        names: name of each process.
        spec, policy: passed to each worker.
        level: log level.
        rest: arguments of ``Workers``.
    """

    def __init__(self, kind: str, names: Sequence[str], spec: WorkerSpec, policy: str, level: str, **rest: Any) -> None:
        super().__init__(names, **rest)
        self.kind, self.spec, self.policy, self.level = kind, spec, policy, level
        self._processes: dict[int, LocalProcess] = {}

    async def send(self, number: int, method: str, *args: Any) -> Any:
        if number not in self._processes:
            raise self.lost_error(number, "it was ended")
        try:
            return await self._processes[number].call(method, *args)
        except ProcessEnded as ended:
            raise self.lost_error(number, str(ended)) from None

    async def restart(self, number: int) -> None:
        await self.kill(number)
        self._processes[number] = LocalProcess(self.spec.directory, self.names[number], self.level)
        await self.send(number, "make", self.kind, self.spec, self.policy)

    async def kill(self, number: int) -> None:
        if (process := self._processes.pop(number, None)) is not None:
            await process.kill()

    async def computes(self, number: int) -> bool:
        return await asyncio.to_thread(uses_cpu, self._processes[number].pid)

    def lines(self, number: int) -> tuple[str, ...]:
        return last_lines(self.spec.directory, self.names[number])
