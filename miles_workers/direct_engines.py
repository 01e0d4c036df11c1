"""The engines of a policy in a rollout worker, which sends requests directly to their processes, so that the driver handles no tokens.

The driver pauses, updates and replaces engines. It sends each worker the set of engines that serve (``EngineState``) whenever it changes. A
worker that loses the connection to an engine reports the loss, sends the request to another one, and waits if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.errors import WorkerLost
from miles_workers.busy_time import BusyTime
from miles_workers.engine_pool import EnginePool
from miles_workers.mailbox import Mailbox
from miles_workers.timeouts import Timeouts
from miles_workers.workers import Method, P, Workers

#: Cause of the loss of requests that were in flight when the driver replaced their engine.
REPLACED = "it was replaced"


@dataclass(frozen=True)
class EngineState:
    """The driver's view of the engines of a policy.

    Attributes:
        engines: handle to their processes.
        serving: indexes of the engines that accept requests.
        replaced: engine -> how often it was replaced.
    """

    engines: Workers
    serving: frozenset[int]
    replaced: Mapping[int, int]

    @classmethod
    def of(cls, pool: EnginePool) -> EngineState:
        """Return the state of the driver's pool."""
        return cls(pool.engines, frozenset(pool.serving), dict(pool.replaced))


@dataclass(frozen=True)
class LostEngine:
    """An engine that a worker lost, see ``EnginePool.report_lost``."""

    policy: str
    number: int
    replaced: int
    cause: str


class ReportedBusyTime(BusyTime):
    """Passes on when an engine becomes busy or idle, because the driver measures all workers.

    Args:
        report: called with the engine's name and 1 or -1.
    """

    def __init__(self, report: Callable[[str, int], None]) -> None:
        super().__init__()
        self._report = report

    def add(self, name: str, change: int) -> None:
        before = bool(self.open(name))
        super().add(name, change)
        if before != bool(self.open(name)):
            self._report(name, change)


class DirectEngines(EnginePool):
    """Sends requests to the engines that serve.

    Args:
        policy: name of the policy.
        engines, build_info: see ``EnginePool``.
        client: name of this worker, unique among all that ever send requests to these engines.
        place: number of this worker and number of workers: each of them begins with other engines.
        timeouts: timeouts of requests.
        busy: measures the requests.
        lost: called when an engine is lost.
    """

    def __init__(
        self,
        policy: str,
        engines: Workers,
        build_info: Mapping[str, Any],
        client: str,
        place: tuple[int, int],
        timeouts: Timeouts,
        busy: BusyTime,
        lost: Callable[[LostEngine], None],
    ) -> None:
        engines.timeouts, engines.busy = timeouts, busy
        super().__init__(engines, build_info, client=client)
        self.policy, self.client, self._lost = policy, client, lost
        self.serving, self._alive = set(), set()
        first = place[0] * len(engines) // place[1]
        for number in range(
            len(engines)
        ):  # a fraction below 1, which decides between engines with equal numbers of requests
            self._in_flight.add(number, (number - first) % len(engines) / (1 << 20))

    def update(self, state: EngineState) -> None:
        """Use the engines of ``state`` from now on."""
        timeouts, busy = self.engines.timeouts, self.engines.busy
        self.engines, self.engines.timeouts, self.engines.busy = state.engines, timeouts, busy
        for number in range(len(self.engines)):
            if state.replaced.get(number, 0) != self.replaced[number]:
                self._forget_engine(number)
                self._mail[number] = Mailbox(self.engines, number, self.client)
                self._lost_engines.pop(number, None)
        self.replaced.clear()
        self.replaced.update(state.replaced)
        self._alive = {*range(len(self.engines))} - {*self._lost_engines}
        self.serving = {*state.serving} - {*self._lost_engines}
        self._news.set()

    def replace_lost(self, lost: WorkerLost) -> None:
        """Report a lost engine. Its requests fail with ``lost`` and are sent again."""
        if lost.worker not in self.engines.names:
            raise lost
        if lost.cause == REPLACED:
            return
        number = self.engines.names.index(lost.worker)
        if number in self._alive:
            self._alive.discard(number)
            self.serving.discard(number)
            self._lost_engines[number] = lost
            self._mail[number].close(lost)
            self._lost(LostEngine(self.policy, number, self.replaced[number], lost.cause))

    async def _call(self, number: int, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        replaced = self.replaced[number]
        try:
            await self.engines.call(number, method, *args, **kwargs)
        except WorkerLost as lost:
            if self.replaced[number] == replaced:
                self.replace_lost(lost)

    def _forget_engine(self, number: int) -> None:
        """Fail the requests in flight at an engine that was replaced."""
        name = self.engines.names[number]
        self._mail[number].close(WorkerLost(name, REPLACED))
        self._sent = {key: engine for key, engine in self._sent.items() if engine != number}
