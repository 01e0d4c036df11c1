"""A runtime with workers in this process that behave like remote ones: arguments and results are pickled, and workers can be killed.

``plugin`` is its manifest: ``--plugins .../remote.py --runtime remote``. ``kill`` ends a worker like a crash.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.contracts.run import Policy, Run
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.options import option
from miles_core.version import __version__
from miles_workers.busy_time import BusyTime
from miles_workers.engine_worker import EngineWorker
from miles_workers.rank_worker import RankWorker
from miles_workers.rollout_worker import RolloutWorker
from miles_workers.runtime import RemoteRuntime
from miles_workers.timeouts import Timeouts, ignore_error
from miles_workers.worker import Worker, WorkerSpec
from miles_workers.workers import Workers


@dataclass(frozen=True, kw_only=True)
class DoubleConfig:
    """Options of the runtime."""

    engines: int = option(1, help="number of engines", flag="--remote-engines", ge=1)


plugin = Plugin(
    name="remote",
    summary="workers that behave as if they were in other processes",
    version=__version__,
    core=f"=={__version__}",
    config=DoubleConfig,
    provides={"runtime": {"remote": "miles_testing.doubles.remote:make_runtime"}},
    capabilities={"runtime": ("remote", "rollout_workers")},
)


class Process:
    """A worker that runs until it is killed."""

    def __init__(self, kind: type[Worker], spec: WorkerSpec, policy: str) -> None:
        self.worker = kind(*_send_copy((spec, policy)))
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = False


#: Every worker of every runtime in this process, by the number of its ``DoubleWorkers`` and its name.
_ALIVE: dict[tuple[int, str], Process] = {}
_NUMBERS = itertools.count()


class DoubleWorkers(Workers):
    """Access to objects of this process through the interface of remote workers."""

    def __init__(
        self,
        kind: type[Worker],
        names: Sequence[str],
        spec: WorkerSpec,
        policy: str,
        timeouts: Timeouts,
        busy: BusyTime,
    ) -> None:
        super().__init__(names, timeouts, kind is RankWorker, busy)
        self.kind, self.spec, self.policy, self.number = kind, spec, policy, next(_NUMBERS)
        #: number of workers created, including replaced ones
        self.made = 0

    async def send(self, number: int, method: str, *args: Any) -> Any:
        process = _ALIVE.get((self.number, self.names[number]))
        if process is None:
            raise self.lost_error(number, "it was killed")
        if process.stopped:
            await asyncio.wait([process.killed])  # wait does not cancel the future if this call is cancelled
            raise self.lost_error(number, "it was killed")
        answer = asyncio.ensure_future(process.worker.answer(method, *_send_copy(args)))
        answer.add_done_callback(ignore_error)  # an error that comes together with the end of the process
        try:
            await asyncio.wait([answer, process.killed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        if process.killed.done():
            raise self.lost_error(number, "it was killed")
        return _send_copy(answer.result())

    async def restart(self, number: int) -> None:
        await self.kill(number)
        self.made += 1
        with self.name_errors(number):
            _ALIVE[self.number, self.names[number]] = Process(self.kind, self.spec, self.policy)

    async def kill(self, number: int) -> None:
        self.crash(number)

    def stop(self, number: int) -> None:
        """Stop a worker from answering, as SIGSTOP does."""
        if process := _ALIVE.get((self.number, self.names[number])):
            process.stopped = True

    def crash(self, number: int) -> None:
        """End a worker; its calls fail immediately."""
        process = _ALIVE.pop((self.number, self.names[number]), None)
        if process is not None:
            process.killed.set_result(None)
            if isinstance(process.worker, RolloutWorker):  # its functions would continue to send requests to engines
                process.worker.cancel_groups()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.number, self.names)


class _CopiedWorkers(DoubleWorkers):
    """The form in which other workers receive it."""

    def __init__(self, number: int, names: Sequence[str]) -> None:
        Workers.__init__(self, names)
        self.number = number


def _restore(number: int, names: Sequence[str]) -> DoubleWorkers:
    return _CopiedWorkers(number, names)


def _send_copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class DoubleRuntime(RemoteRuntime):
    """Runs one rank and ``--remote-engines`` engines per policy."""

    def __init__(self, run: Run) -> None:
        self.options: DoubleConfig = run.config.plugin("remote")
        super().__init__(run)
        self.workers: dict[str, DoubleWorkers] = {}

    async def place(self, policy: Policy) -> tuple[Workers, Workers]:
        made = []
        for kind, names in (
            (RankWorker, self.names(policy, "trainer", 1)),
            (EngineWorker, self.names(policy, "engine", self.options.engines if policy.generates else 0)),
        ):
            workers = DoubleWorkers(kind, names, self.spec, policy.name, self.timeouts, self.busy)
            self.workers |= dict.fromkeys(names, workers)
            made.append(await self.start(workers))
        return made[0], made[1]

    def place_rollouts(self, names: Sequence[str]) -> Workers:
        policy = self.run.policy.name
        workers = DoubleWorkers(RolloutWorker, names, self.spec, policy, self.timeouts, self.busy)
        self.workers |= dict.fromkeys(names, workers)
        return workers

    def kill(self, name: str) -> None:
        """End the worker ``name``."""
        workers = self.workers[name]
        workers.crash(workers.names.index(name))

    def hang(self, name: str) -> None:
        """Stop the worker ``name`` without ending it."""
        workers = self.workers[name]
        workers.stop(workers.names.index(name))


def make_runtime(run: Run) -> DoubleRuntime:
    """Make the runtime of ``--runtime remote``; ``latest()`` returns the last one."""
    global _latest
    _latest = DoubleRuntime(run)
    return _latest


_latest: DoubleRuntime | None = None


def latest() -> DoubleRuntime:
    """Return the runtime of the current run, for tests that kill its workers."""
    assert _latest is not None
    return _latest
