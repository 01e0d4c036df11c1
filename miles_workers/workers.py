"""Interface to a set of worker processes, which each runtime implements; detects lost workers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from miles_core.errors import MilesError, WorkerLost
from miles_workers.busy_time import BusyTime
from miles_workers.object_ref import Stored
from miles_workers.timeouts import PIECES, TimeoutExpired, Timeouts, wait_for
from miles_workers.worker import Worker

log = logging.getLogger(__name__)

#: Timeout in seconds for ending a process.
KILLING = 10.0
#: Seconds that workers have to release their resources when the run ends, and after a stop request.
FAREWELL, FAREWELL_STOPPED = 10.0, 2.0
#: Seconds to wait for the report of a rank's death after its peers failed. A cluster needs half a minute to detect a dead machine.
GRACE = 60.0


P = ParamSpec("P")
T = TypeVar("T")
#: A method of a worker, or of the rank or engine that it holds. Its name and its positional arguments are sent.
AsyncMethod = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
Method = Callable[Concatenate[Any, P], T]


class Workers(ABC):
    """Processes of one kind, numbered from 0.

    A runtime implements how to call (``send``), replace (``restart``) and end (``kill``) a process. The object is also sent to ranks,
    which use it to call engines: there it has no timeouts, because the driver watches all workers.

    Args:
        names: name of each worker in messages and metrics.
        timeouts: timeouts.
        trains: True if the workers hold trained weights.
        busy: measures all calls.

    Attributes:
        lost: number -> reason why a worker counts as lost, until it is replaced.
        waits: number -> names of the workers that it waited for at its last heartbeat.
        peers: all workers of the run; ``_culprit`` searches them for the worker that blocks others.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeouts: Timeouts | None = None,
        trains: bool = False,
        busy: BusyTime | None = None,
    ) -> None:
        self.names, self.timeouts, self.trains = tuple(names), timeouts or Timeouts(), trains
        self.busy = busy or BusyTime()
        self._reset()

    def _reset(self) -> None:
        self.lost: dict[int, WorkerLost] = {}
        self.waits: dict[int, tuple[str, ...]] = {}
        self.peers: Sequence[Workers] = (self,)
        self._down: dict[int, asyncio.Future[Any]] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        there = {**self.__dict__, "timeouts": Timeouts(), "busy": BusyTime()}
        return {name: value for name, value in there.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._reset()

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    async def send(self, number: int, method: str, *args: Any) -> Any:
        """Call ``Worker.answer(method, *args)`` in that process; return its result or raise its error. WorkerLost if it died."""

    async def send_stored(self, number: int, method: str, *args: Any) -> tuple[Any, Sequence[Stored]]:
        """Call a method that returns (value, stored objects); return the value and references to the objects.

        The objects are not read here. They exist until the last reference is dropped, also if the worker ends before."""
        value, refs = await self.send(number, method, *args)
        return value, refs

    @abstractmethod
    async def restart(self, number: int) -> None:
        """End the remains of a worker and start a new one in its place without building it. Call ``watch`` as soon as it responds to
        ``beat``. Called by ``start``."""

    @abstractmethod
    async def kill(self, number: int) -> None:
        """End a worker's process in whatever state it is, so that calls to it fail."""

    async def beat(self, number: int) -> Sequence[str]:
        """Send a heartbeat to a worker; return the names of the workers that it waits for. The worker's process answers from a separate
        thread, so also while it computes."""
        found: Sequence[str] = await self.send(number, "beat")
        return found

    async def computes(self, number: int) -> bool:
        """Return whether a worker without heartbeats makes progress, as observed from outside its process."""
        return False

    async def end(self) -> None:
        """End all processes immediately."""
        self.unwatch()
        await asyncio.gather(*(self.kill(number) for number in range(len(self))), return_exceptions=True)

    def share(self, value: Any) -> Any:
        """Convert ``value`` for efficient passing to several calls; the worker receives the plain value."""
        return value

    async def host(self) -> str:
        """Return the network address at which other workers reach number 0."""
        return "127.0.0.1"

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the last lines that a worker wrote, for messages."""
        return ()

    async def start(self, number: int) -> None:
        """Start a worker, or replace it. Raises WorkerLost if it dies in the meantime or exceeds the timeout."""
        self.unwatch(number)
        self._down.pop(number, None)
        self.lost.pop(number, None)
        self.waits.pop(number, None)
        await self.await_answer(number, self.restart(number), "make")
        self.watch(number)

    def watch(self, number: int) -> None:
        """Start watching the heartbeats of a worker."""
        if self.timeouts.heartbeat is not None and number not in self._watching:
            self._watching[number] = asyncio.create_task(self._watch(number, self.timeouts.heartbeat))

    def unwatch(self, number: int | None = None) -> None:
        """Stop watching the heartbeats of one worker, or of all."""
        for which in [*self._watching] if number is None else [number]:
            if (task := self._watching.pop(which, None)) is not None and task is not asyncio.current_task():
                task.cancel()

    @overload
    async def call(self, number: int, method: AsyncMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def call(self, number: int, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def call(self, number: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a worker with a timeout, and return its result.

        Raises:
            WorkerLost: the timeout expired, or the worker or one that it waits for died or hangs.
            Exception: the worker's error, with ``worker`` set.
        """
        assert not kwargs, "arguments are sent by position"
        name = method.__name__
        return await self.await_answer(number, self.send(number, name, *args), name)

    @overload
    async def call_all(self, method: AsyncMethod[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    async def call_all(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    async def call_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of all workers concurrently; return the results by number."""
        return await gather_in_order(self.call(number, method, *args, **kwargs) for number in range(len(self)))

    async def await_answer(self, number: int, answer: Awaitable[Any], named: str) -> Any:
        """Call ``await_result``, count the time as busy, and set the worker of errors."""
        with self.name_errors(number), self.busy.at(self.names[number]):
            return await self.await_result(number, answer, named)

    async def await_result(self, number: int, answer: Awaitable[Any], named: str) -> Any:
        """Await the result of a call with its timeout; messages refer to the call as ``named``.

        Raises:
            WorkerLost: the timeout expired, or the worker or one that it waits for died or hangs.
        """
        name, down = self.names[number], self._down_of(number)
        if down.done():
            _discard(answer)
            raise self.lost[number]
        try:
            return await wait_for(answer, self.timeouts.of(named), down)
        except TimeoutExpired:
            raise await self._give_up_on(number, named) from None
        except WorkerLost as lost:
            if lost.worker == name and number in self.lost:
                raise self.lost[number] from None
            if lost.worker:
                raise
            raise WorkerLost(name, lost.cause, lost.lines, self.trains) from None

    @contextmanager
    def name_errors(self, number: int) -> Iterator[None]:
        """Record in errors of the body that this worker raised them, unless they came from another one."""
        name = self.names[number]
        try:
            yield
        except MilesError as error:
            error.worker = error.worker or name
            raise
        except Exception as error:
            if not short_of_memory(error):
                error.add_note(f"raised in worker {name}")
                raise
            first = str(error).strip().partition("\n")[0]
            short = MilesError(
                f"not enough memory ({first}): lower --max-tokens-per-gpu or --micro-batch-size where it trains, "
                "--max-running-requests where it generates, or give it more processes"
            )
            short.worker = name
            raise short from error

    def lost_error(self, number: int, cause: str) -> WorkerLost:
        """Return the error for the loss of a worker; the cause reported first is kept."""
        if number in self.lost:
            return self.lost[number]
        return WorkerLost(self.names[number], cause, self.lines(number), self.trains)

    async def declare_lost(self, number: int, cause: str) -> WorkerLost:
        """Declare a worker lost: fail its calls in flight and end its process, so that other workers do not wait for it."""
        lost = self.lost[number] = self.lost_error(number, cause)
        if not (down := self._down_of(number)).done():
            down.set_exception(lost)
            down.exception()
        self.unwatch(number)
        with suppress(Exception):  # the process may be unreachable; it counts as lost anyway
            async with asyncio.timeout(KILLING):
                await self.kill(number)
        return lost

    def _down_of(self, number: int) -> asyncio.Future[Any]:
        """Return a future that fails when the worker counts as lost."""
        if number not in self._down:
            self._down[number] = asyncio.get_running_loop().create_future()
        return self._down[number]

    async def _watch(self, number: int, seconds: float) -> None:
        try:
            while await self.await_beat(number, seconds):
                await asyncio.sleep(seconds / PIECES)
        except Exception:  # it died: the next call to it reports the cause
            return

    async def await_beat(self, number: int, seconds: float) -> bool:
        """Await a heartbeat of a worker, and declare the worker lost if none arrives within ``seconds``. Return whether it lives."""
        try:
            self.waits[number] = tuple(await wait_for(self.beat(number), seconds))
        except TimeoutExpired:
            with suppress(Exception):
                if await self.computes(number):  # it computed for so long that its heartbeat thread did not run
                    return True
            if number in self._watching:
                log.warning("worker %s gives no sign of life", self.names[number])
                await self.declare_lost(
                    number, f"it gave no sign of life for {seconds:g} s (its process is stopped or hangs)"
                )
            return False
        return True

    async def _give_up_on(self, number: int, named: str) -> WorkerLost:
        """Declare the worker lost that caused a timeout: the called worker, or the one that blocks it."""
        limit = self.timeouts.of(named)
        workers, at = self._culprit(number)
        if (workers, at) == (self, number):
            return await self.declare_lost(number, f"it did not answer {named!r} within {limit:g} s")
        return await workers.declare_lost(
            at, f"{self.names[number]} waited for it and did not answer {named!r} within {limit:g} s"
        )

    def _culprit(self, number: int) -> tuple[Workers, int]:
        """Return the last worker in the chain of workers that wait for each other, as reported by their heartbeats."""
        where = {name: (workers, at) for workers in self.peers for at, name in enumerate(workers.names)}
        workers, at, seen = self, number, {self.names[number]}
        while found := [name for name in workers.waits.get(at, ()) if name in where and name not in seen]:
            seen.add(found[0])
            workers, at = where[found[0]]
        return workers, at


#: Attributes of ``Workers`` that are not sent to other processes.
_OWN = ("lost", "waits", "peers", "_down", "_watching")


def _discard(answer: Awaitable[Any]) -> None:
    """Close or cancel an awaitable that will not be awaited."""
    if isinstance(answer, asyncio.Future):
        answer.cancel()
    elif inspect.iscoroutine(answer):
        answer.close()


def short_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that a process ran out of memory, on the host or on a GPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def portable(error: Exception) -> Exception:
    """Convert an error to one that another process can raise: errors of other libraries become their message."""
    if isinstance(error, MilesError) or short_of_memory(error):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


async def gather_in_order(calls: Any) -> list[Any]:
    """Return the results in order. The first error is raised immediately; the other calls continue and their results are discarded."""
    return list(await asyncio.gather(*calls))


async def await_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls of a collective and return the results in order. If several fail, the loss of a worker takes precedence,
    because its peers only report a broken connection."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if error := await first_error(tasks):
            raise error
    finally:
        for task in tasks:
            task.cancel()
    return [task.result() for task in tasks]


async def first_error(tasks: Sequence[asyncio.Task[Any]]) -> BaseException | None:
    """Wait until all tasks have ended or one has lost its worker; after another error, at most ``GRACE`` seconds longer.

    Returns:
        the loss of a worker, else the first error; None if there is none.
    """
    first: BaseException | None = None
    deadline: float | None = None
    while True:
        done = [task for task in tasks if task.done() and not task.cancelled()]
        errors = [error for task in done if (error := task.exception()) is not None]
        if lost := next((error for error in errors if isinstance(error, WorkerLost)), None):
            return lost
        if errors and first is None:
            first, deadline = errors[0], time.monotonic() + GRACE
        waiting = [task for task in tasks if not task.done()]
        left = None if deadline is None else deadline - time.monotonic()
        if not waiting or (left is not None and left <= 0):
            return first
        await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)


async def close_workers(placed: Iterable[Workers], stopped: bool) -> None:
    """Let workers release their resources, and end them. stopped: the user requested a stop, so there is less time."""
    placed = [*placed]
    goodbyes = [asyncio.ensure_future(w.call(number, Worker.close)) for w in placed for number in range(len(w))]
    if goodbyes:  # workers that do not respond are ended anyway
        _, late = await asyncio.wait(goodbyes, timeout=FAREWELL_STOPPED if stopped else FAREWELL)
        for task in late:
            task.cancel()
        await asyncio.gather(*goodbyes, return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL):
            await asyncio.gather(*(workers.end() for workers in placed))


def require_agreement(what: str, found: Mapping[str, Any]) -> Any:
    """Return the common value of several workers; ``found`` maps worker names to values.

    Raises:
        RuntimeError: the values differ.
    """

    values = list(found.values())
    if any(value != values[0] for value in values):
        raise RuntimeError(f"{what} differs: " + ", ".join(f"{name} has {value}" for name, value in found.items()))
    return values[0]
