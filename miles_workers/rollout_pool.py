"""The driver's handle to rollout workers: passes groups and the set of serving engines to them, and replaces lost ones."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Producer
from miles_core.data.batch import add
from miles_core.data.sample import Sample
from miles_core.errors import WorkerLost, first_line
from miles_core.run.parts import await_unless_stopped
from miles_workers.direct_engines import EngineState, LostEngine
from miles_workers.engine_pool import EnginePool
from miles_workers.least_loaded import LeastLoaded
from miles_workers.object_ref import Stored
from miles_workers.prompt_rows import PendingGroup, RowQueue
from miles_workers.remote_sample import pack_samples, refer
from miles_workers.restarts import Restarts
from miles_workers.rollout_worker import (
    Answer,
    EngineCall,
    GroupOrder,
    Letters,
    News,
    RolloutWorker,
    Seat,
)
from miles_workers.workers import Method, P, Workers, await_all, close_workers, portable

log = logging.getLogger(__name__)


class RolloutPool(Producer):
    """Gives each group to the worker with the fewest groups.

    Which worker produces a group changes nothing: samples, their numbers and the keys of their requests are the driver's. If a worker is
    lost, its requests are aborted and its groups are produced again, from the same samples and with the same keys. Workers read prompts from
    prompt files themselves (``prompt_rows``); a worker whose machine lacks these files receives the prompts.

    Args:
        run: the driver's run.
        workers: handle to the processes; each runs a ``RolloutWorker``.
        parts: the parts of all policies.
        restarts: limits how many workers are replaced.
    """

    def __init__(self, run: Run, workers: Workers, parts: Sequence[PolicyParts], restarts: Restarts) -> None:
        super().__init__()
        self.run, self.workers, self.restarts = run, workers, restarts
        self.engines: dict[str, Engine] = {part.policy.name: part.serving for part in parts if part.engine is not None}
        self.direct = {name: engine for name, engine in self.engines.items() if isinstance(engine, EnginePool)}
        self._clients = itertools.count()
        self._lines: dict[int, _Line] = {}
        self._alive: set[int] = set()
        self._load = LeastLoaded()
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._queue: RowQueue | None = None
        self.make_queue = self._make_queue

    async def start(self) -> None:
        for engine in self.direct.values():
            engine.watchers.append(self._send_engines)
        await await_unless_stopped(self.run, self._start_all())

    async def stop(self) -> None:
        for engine in self.direct.values():
            engine.watchers.remove(self._send_engines)
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for line in [*self._lines.values()]:
            await line.close()
        self._lines, self._alive = {}, set()
        await close_workers([self.workers], self.run.stop_requested)

    def _make_queue(self, *args: Any) -> RowQueue:
        self._queue = RowQueue(*args)
        return self._queue

    async def produce(self, samples: Sequence[Sample], evaluation: bool = False) -> list[Sample]:
        while True:
            line = await self._choose()
            order = self._order(line, samples, evaluation)
            for engine in self.direct.values():
                if engine.failure is not None:
                    raise engine.failure
            self._load.add(line.number, 1)
            try:
                with self.workers.name_errors(line.number), self.workers.busy.at(line.name):
                    return await line.produce(order)
            except WorkerLost as lost:
                if lost.worker != line.name:
                    raise
            finally:
                self._load.add(line.number, -1)

    async def abort(self, samples: Collection[int]) -> None:
        """Wait until workers have dropped the groups whose ``produce`` was cancelled."""
        await asyncio.gather(*(line.dropped() for line in self._lines.values()))

    def _order(self, line: _Line, samples: Sequence[Sample], evaluation: bool) -> GroupOrder:
        """Return the order for a group that the worker of ``line`` produces."""
        if not isinstance(samples, PendingGroup):
            return GroupOrder(pack_samples(samples), [sample.index for sample in samples], evaluation)
        if samples.row is not None and self._queue is not None and line.reads(self._queue.digest):
            return GroupOrder(samples.row, samples.indexes, evaluation)
        return GroupOrder(pack_samples(samples[:1]), samples.indexes, evaluation)

    async def _choose(self) -> _Line:
        """Return the line to the worker with the fewest groups; wait for one if all are being replaced."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._alive:
                return self._lines[self._load.choose(self._alive)]
            self._changed.clear()
            await self._changed.wait()

    async def _start_all(self) -> None:
        await await_all(self._start(number) for number in range(len(self.workers)))

    async def _start(self, number: int) -> None:
        """Start and build a worker; retry if it dies."""
        engines = {name: (engine.engines, engine.build_info) for name, engine in self.direct.items()}
        while True:
            client = f"{self.workers.names[number]}-{next(self._clients)}"
            try:
                await self.workers.start(number)
                await self.workers.call(number, RolloutWorker.confirm_plan)
                seat = Seat(number, len(self.workers), client, tuple(self.engines), engines)
                rows = await self.workers.call(number, RolloutWorker.build, seat)
                break
            except WorkerLost as lost:
                self.restarts.spend(lost)
        self._lines[number] = _Line(self, number, client, self._lose, rows)
        self._alive = {*self._alive, number}  # a new set: see ``LeastLoaded.choose``
        self._changed.set()

    def _send_engines(self) -> None:
        """Send all workers the set of serving engines."""
        for line in [*self._lines.values()]:
            line.send_engines()

    def _lose(self, number: int, lost: WorkerLost) -> None:
        """Replace a lost worker. Its groups go to others meanwhile."""
        self._alive.discard(number)
        del self._lines[number]
        task = asyncio.create_task(self._replace(number, lost))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _replace(self, number: int, lost: WorkerLost) -> None:
        try:
            self.restarts.spend(lost)
            await self._start(number)
        except Exception as error:
            self._failure = error
            for line in self._lines.values():
                line.fail(error)
            self._changed.set()


class _Line:
    """The connection to one running worker.

    Args:
        pool: the pool, for its run, workers and engines.
        number: index of the worker.
        client: name under which the worker sends requests to engines.
        lose: called with the number and the loss after the worker's requests were aborted.
        rows: result of ``RolloutWorker.build``: the digest of the prompt files that the worker reads, and why it cannot read them.
    """

    def __init__(
        self,
        pool: RolloutPool,
        number: int,
        client: str,
        lose: Callable[[int, WorkerLost], None],
        rows: tuple[str, str] = ("", ""),
    ) -> None:
        self.pool, self.number, self.client, self.lose = pool, number, client, lose
        self._rows, self._warned = rows, False
        self.name = pool.workers.names[number]
        self._tickets = itertools.count()
        self._open: dict[int, asyncio.Future[list[Sample]]] = {}
        self._calls: dict[int, tuple[EngineCall, asyncio.Task[None]]] = {}
        self._groups: dict[int, GroupOrder] = {}
        self._answers: dict[int, Answer] = {}
        self._drops: set[int] = set()
        self._posts: set[asyncio.Task[None]] = set()
        self._posting = self._engines_changed = False
        self._policies: dict[str, tuple[int, int]] = {}
        self._busy: dict[str, int] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self.send_engines()
        self._collecting = asyncio.create_task(self._collect())

    def reads(self, digest: str) -> bool:
        """Whether the worker reads the rows with this digest. The first time that it does not, log why."""
        found, problem = self._rows
        if found != digest and not self._warned:
            why = problem or "its prompt files have other rows than the driver's"
            log.warning("worker %s does not read prompts itself, so the driver sends them: %s", self.name, why)
            self._warned = True
        return found == digest

    async def produce(self, order: GroupOrder) -> list[Sample]:
        """Send a group and return references to its samples. Raises the error of the rollout, or the worker's loss."""
        ticket = next(self._tickets)
        answer: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answer
        self._groups[ticket] = order
        self._post_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._groups.pop(ticket, None) is None:  # it was sent
                self._drops.add(ticket)
            raise
        finally:
            del self._open[ticket]

    async def dropped(self) -> None:
        """Make the worker drop the groups that were cancelled; return when it has."""
        tickets, self._drops = self._drops, set()
        if tickets:
            await asyncio.gather(*self._posts)  # which may contain them
            await self._call(RolloutWorker.drop, tickets)

    def send_engines(self) -> None:
        """Send the worker the set of serving engines; fail all groups if lost engines cannot be replaced."""
        for engine in self.pool.direct.values():
            if (failure := engine.failure) is not None:
                self.fail(failure)
        if self.pool.direct:
            self._engines_changed = True
            self._post_soon()

    def fail(self, error: Exception) -> None:
        """Fail all groups."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        """Stop the exchange of messages."""
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)
        if any(self._busy.values()):
            await self._forget_requests()
        await self._end_calls()

    async def _collect(self) -> None:
        """Receive news until the worker is lost; then abort its requests and fail its groups."""
        workers = self.pool.workers
        try:
            while True:
                coming = workers.send_stored(self.number, RolloutWorker.news.__name__)
                news, refs = await workers.await_result(self.number, coming, "news")
                self._receive(News.unpack(news), refs)
        except Exception as error:
            lost = (
                error if isinstance(error, WorkerLost) else await workers.declare_lost(self.number, first_line(error))
            )
            try:
                await self._forget_requests()
                await self._end_calls()
            finally:
                self.lose(self.number, lost)
                self.fail(lost)

    def _receive(self, news: News, refs: Sequence[Stored]) -> None:
        add(self.pool.answers, news.answers)
        self._receive_reports(news)
        for ticket in news.cancelled:
            if ticket in self._calls:
                self._calls[ticket][1].cancel()
        for ticket, call in news.calls.items():
            self._calls[ticket] = call, asyncio.create_task(self._serve(ticket, call))
        for ticket, (value, error) in news.groups.items():
            answer = self._open.get(ticket)
            if answer is not None and not answer.done():
                if error is None:
                    answer.set_result(refer(value[0], refs[value[1]]))
                else:
                    answer.set_exception(error)

    def _receive_reports(self, news: News) -> None:
        """Receive the reports on engines."""
        for name, change in news.busy:
            self._busy[name] = self._busy.get(name, 0) + change
            self.pool.workers.busy.add(name, change)
        for lost in news.lost:
            report = asyncio.create_task(self._report(lost))
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)

    async def _report(self, lost: LostEngine) -> None:
        try:
            await self.pool.direct[lost.policy].report_lost(lost.number, lost.replaced, lost.cause)
        except Exception as error:  # the engine is not replaced
            self.fail(error)

    async def _serve(self, ticket: int, call: EngineCall) -> None:
        """Make a call of an engine and send its answer to the worker."""
        try:
            answer: Answer = await getattr(self.pool.engines[call.policy], call.method)(call.argument), None
        except Exception as error:
            answer = None, portable(error)
        self._answers[ticket] = answer
        self._calls.pop(ticket, None)
        if call.method == "abort":
            self._forget_cancelled({*call.argument})
        self._post_soon()

    def _forget_cancelled(self, keys: Collection[int]) -> None:
        """Forget the cancelled requests with these keys, which the engine has aborted."""
        for ticket, (call, task) in [*self._calls.items()]:
            if task.cancelled() and call.method == "generate" and call.argument.key in keys:
                del self._calls[ticket]

    async def _forget_requests(self) -> None:
        """Make the engines abort the requests that the worker sent them."""
        for name, count in self._busy.items():
            self.pool.workers.busy.add(name, -count)
        self._busy = {}
        for engine in self.pool.direct.values():
            with suppress(WorkerLost):  # its requests are gone, too
                await engine.forget(self.client)

    async def _end_calls(self) -> None:
        """Cancel the calls of engines that the driver makes for the worker, and make the engines abort them."""
        calls, self._calls = self._calls, {}
        for _, task in calls.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in calls.values()), return_exceptions=True)
        for policy, engine in self.pool.engines.items():
            keys = [c.argument.key for c, _ in calls.values() if (c.policy, c.method) == (policy, "generate")]
            with suppress(WorkerLost):  # its requests are gone, too; the next request reports the loss
                await engine.abort(keys)

    def _post_soon(self) -> None:
        """Send everything that is added in this iteration of the event loop in one call."""
        if not self._posting:
            self._posting = True
            task = asyncio.create_task(self._post())
            self._posts.add(task)
            task.add_done_callback(self._posts.discard)

    async def _post(self) -> None:
        self._posting = False
        run, direct = self.pool.run, self.pool.direct if self._engines_changed else {}
        if self._groups or self._answers or direct:
            policies = {policy.name: (policy.version, policy.trained) for policy in run.policies}
            engines = {name: EngineState.of(engine) for name, engine in direct.items()}
            changed = {} if policies == self._policies else policies
            letters = Letters(run.step, changed, self._groups, self._answers, engines)
            self._groups, self._answers, self._engines_changed, self._policies = {}, {}, False, policies
            await self._call(RolloutWorker.post, letters.pack())

    async def _call(self, method: Method[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the worker. If the worker is lost, ``_collect`` notices; another error fails all groups."""
        assert not kwargs, "arguments are sent by position"
        workers, name = self.pool.workers, method.__name__
        try:
            await workers.await_result(self.number, workers.send(self.number, name, *args), name)
        except WorkerLost:
            pass
        except Exception as error:
            self.fail(error)
