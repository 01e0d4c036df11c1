"""How processes of one kind are reached: the part of a runtime that is its own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from miles_core.errors import MilesError, WorkerLost
from miles_runtime.patience import PIECES, Patience, TimeoutExpired, wait_for

log = logging.getLogger(__name__)

#: Seconds that ending a process may take.
KILLING = 10.0
#: Seconds in which the death of a rank becomes known after its peers failed; that of a whole machine takes a cluster half a minute.
GRACE = 60.0


class Busy:
    """For which part of the time each of some workers had something to do."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """One more call is out at a worker; calls that overlap count once."""
        now = time.perf_counter()
        if not self._open.get(name):
            self._since[name] = now
        self._open[name] = self._open.get(name, 0) + 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - self._since[name]

    def open(self, name: str) -> int:
        """Calls that are out at a worker now."""
        return self._open.get(name, 0)

    def metrics(self) -> dict[str, float]:
        """``busy/NAME`` in seconds and ``idle/NAME``, the share of the time, since the last call; starts anew."""
        now = time.perf_counter()
        whole = max(now - self._start, 1e-9)
        found: dict[str, float] = {}
        for name, count in self._open.items():
            seconds = self._seconds.get(name, 0.0) + (now - max(self._since[name], self._start) if count else 0.0)
            found |= {f"busy/{name}": seconds, f"idle/{name}": max(0.0, 1 - seconds / whole)}
            self._since[name] = now
        self._seconds, self._start = {}, now
        return found


class Workers(ABC):
    """Processes of one kind, numbered from 0.

    A runtime implements how one is reached (``send``), replaced (``renew``) and ended (``kill``). The object is also sent to ranks, which
    reach engines through it: there it only sends, and waits as long as it takes, because the driver watches all workers.

    Args:
        names: one for each, as messages and metrics call it.
        patience: how long a worker may take.
        trains: they hold trained weights.
        busy: counts every call.

    Attributes:
        gone: number -> why a worker counts as lost, until it is replaced.
        waits: number -> names of the workers that it waited for at its last heartbeat.
        peers: all workers of the run, among which the one that makes others wait is looked for.
    """

    def __init__(
        self,
        names: Sequence[str],
        patience: Patience | None = None,
        trains: bool = False,
        busy: Busy | None = None,
    ) -> None:
        self.names, self.patience, self.trains = tuple(names), patience or Patience(), trains
        self.busy = busy or Busy()
        self._reset()

    def _reset(self) -> None:
        self.gone: dict[int, WorkerLost] = {}
        self.waits: dict[int, tuple[str, ...]] = {}
        self.peers: Sequence[Workers] = (self,)
        self._down: dict[int, asyncio.Future[Any]] = {}
        self._watching: dict[int, asyncio.Task[None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        there = {**self.__dict__, "patience": Patience(), "busy": Busy()}
        return {name: value for name, value in there.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._reset()

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    async def send(self, number: int, method: str, *args: Any) -> Any:
        """What ``Worker.answer(method, *args)`` returns in that process, or raises there. WorkerLost when it died."""

    @abstractmethod
    async def renew(self, number: int) -> None:
        """End what is left of a worker and make a new one in its place, not built yet. Calls ``watch`` as soon as it answers ``beat``.
        Called by ``start``."""

    @abstractmethod
    async def kill(self, number: int) -> None:
        """End a worker's process, whatever state it is in, so that calls to it fail."""

    async def beat(self, number: int) -> Sequence[str]:
        """The names of the workers that this one waits for. A runtime answers it from a thread of its own, while the worker computes."""
        found: Sequence[str] = await self.send(number, "beat")
        return found

    async def computes(self, number: int) -> bool:
        """Whether a worker that misses its heartbeats is seen to make progress from outside of its process."""
        return False

    async def end(self) -> None:
        """End all processes, at once."""
        self.unwatch()
        await asyncio.gather(*(self.kill(number) for number in range(len(self))), return_exceptions=True)

    def share(self, value: Any) -> Any:
        """``value`` as it is best passed to several calls; the worker finds the value itself."""
        return value

    async def host(self) -> str:
        """The address under which other workers reach number 0."""
        return "127.0.0.1"

    def lines(self, number: int) -> tuple[str, ...]:
        """What a worker wrote last, for messages."""
        return ()

    async def start(self, number: int) -> None:
        """Replace a worker, or make it for the first time. WorkerLost when it dies meanwhile or takes too long."""
        self.unwatch(number)
        self._down.pop(number, None)
        self.gone.pop(number, None)
        self.waits.pop(number, None)
        await self.answered(number, self.renew(number), "make")
        self.watch(number)

    def watch(self, number: int) -> None:
        """Expect heartbeats of a worker from now on."""
        if self.patience.heartbeat is not None and number not in self._watching:
            self._watching[number] = asyncio.create_task(self._watch(number, self.patience.heartbeat))

    def unwatch(self, number: int | None = None) -> None:
        """Expect no heartbeats any more: of one worker, or of all."""
        for which in [*self._watching] if number is None else [number]:
            if (task := self._watching.pop(which, None)) is not None and task is not asyncio.current_task():
                task.cancel()

    async def call(self, number: int, method: str, *args: Any, named: str = "") -> Any:
        """``send``, and WorkerLost for a worker that does not answer in time; messages call the call ``named``."""
        return await self.answered(number, self.send(number, method, *args), named or method)

    async def answered(self, number: int, answer: Awaitable[Any], named: str) -> Any:
        """``in_time``, counted as the worker's work, with the worker's name on errors."""
        with self.naming(number), self.busy.at(self.names[number]):
            return await self.in_time(number, answer, named)

    async def in_time(self, number: int, answer: Awaitable[Any], named: str) -> Any:
        """The answer of a worker to a call that messages call ``named``.

        Raises:
            WorkerLost: it did not come in time, or the worker died or hangs, or another one that it waits for.
        """
        name, down = self.names[number], self._down_of(number)
        if down.done():
            _discard(answer)
            raise self.gone[number]
        try:
            return await wait_for(answer, self.patience.of(named), down)
        except TimeoutExpired:
            raise await self._give_up_on(number, named) from None
        except WorkerLost as lost:
            if lost.worker == name and number in self.gone:
                raise self.gone[number] from None
            if lost.worker:
                raise
            raise WorkerLost(name, lost.cause, lost.lines, self.trains) from None

    @contextmanager
    def naming(self, number: int) -> Iterator[None]:
        """Add the worker's name to whatever error the body raises."""
        try:
            yield
        except WorkerLost:
            raise
        except Exception as error:
            if not short_of_memory(error):
                add_worker(error, self.names[number])
                raise
            first = str(error).strip().partition("\n")[0]
            raise MilesError(
                f"worker {self.names[number]} has not enough memory ({first}): lower --max-tokens-per-gpu or --micro-batch-size where it "
                "trains, --max-running-requests where it generates, or give it more processes"
            ) from error

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """What each worker answers, all asked at once."""
        return await gathered(self.call(number, method, *args) for number in range(len(self)))

    def lost(self, number: int, cause: str) -> WorkerLost:
        """The error for the loss of a worker; the cause that was noticed first stays."""
        if number in self.gone:
            return self.gone[number]
        return WorkerLost(self.names[number], cause, self.lines(number), self.trains)

    async def declare_lost(self, number: int, cause: str) -> WorkerLost:
        """Count a worker as lost: calls that are out to it fail, and its process is ended, so that others do not wait for it."""
        lost = self.gone[number] = self.lost(number, cause)
        if not (down := self._down_of(number)).done():
            down.set_exception(lost)
            down.exception()
        self.unwatch(number)
        with suppress(Exception):  # the process may be unreachable; it counts as lost all the same
            async with asyncio.timeout(KILLING):
                await self.kill(number)
        return lost

    def _down_of(self, number: int) -> asyncio.Future[Any]:
        """Raises when a worker counts as lost."""
        if number not in self._down:
            self._down[number] = asyncio.get_running_loop().create_future()
        return self._down[number]

    async def _watch(self, number: int, seconds: float) -> None:
        while True:
            try:
                self.waits[number] = tuple(await wait_for(self.beat(number), seconds))
                await asyncio.sleep(seconds / PIECES)
            except TimeoutExpired:
                with suppress(Exception):
                    if await self.computes(number):  # for so long that no other thread of it had a turn
                        continue
                if self._watching.get(number) is asyncio.current_task():
                    log.warning("worker %s gives no sign of life", self.names[number])
                    await self.declare_lost(
                        number, f"it gave no sign of life for {seconds:g} s (its process is stopped or hangs)"
                    )
                return
            except Exception:  # it died: whoever asks it next finds that out, with the cause
                return

    async def _give_up_on(self, number: int, named: str) -> WorkerLost:
        """The loss of the worker that a call waited too long for: the one that was called, or the one that makes it wait."""
        limit = self.patience.of(named)
        workers, at = self._culprit(number)
        if (workers, at) == (self, number):
            return await self.declare_lost(number, f"it did not answer {named!r} within {limit:g} s")
        return await workers.declare_lost(
            at, f"{self.names[number]} waited for it and did not answer {named!r} within {limit:g} s"
        )

    def _culprit(self, number: int) -> tuple[Workers, int]:
        """The last in the chain of workers that wait for each other, by what their heartbeats reported."""
        where = {name: (workers, at) for workers in self.peers for at, name in enumerate(workers.names)}
        workers, at, seen = self, number, {self.names[number]}
        while found := [name for name in workers.waits.get(at, ()) if name in where and name not in seen]:
            seen.add(found[0])
            workers, at = where[found[0]]
        return workers, at


#: What the driver's ``Workers`` keep for themselves.
_OWN = ("gone", "waits", "peers", "_down", "_watching")


def add_worker(error: Exception, worker: str) -> None:
    """Put the name of the worker that raised an error in front of its message, unless a worker's name is there already."""
    text = str(error)
    if text.startswith("worker "):
        return
    if error.args and isinstance(error.args[0], str) and text == error.args[0]:
        error.args = (f"worker {worker}: {text}", *error.args[1:])
        if str(error) != text:
            return
    error.add_note(f"raised in worker {worker}")


def _discard(answer: Awaitable[Any]) -> None:
    """Release what will not be awaited."""
    if isinstance(answer, asyncio.Future):
        answer.cancel()
    elif inspect.iscoroutine(answer):
        answer.close()


class Restarts:
    """How many workers a run may still replace."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.forbidden = limit, 0, False

    @property
    def left(self) -> bool:
        """Whether one more may be replaced."""
        return not self.forbidden and self.used < self.limit

    def forbid(self) -> None:
        """Allow none from now on."""
        self.forbidden = True

    def spend(self, lost: WorkerLost) -> None:
        """Allow one more, or raise ``lost`` with what that means."""
        if self.forbidden:
            raise lost
        if self.used >= self.limit:
            often = f"{self.used} workers were replaced before it" if self.used else "none may be replaced"
            raise WorkerLost(
                lost.worker, f"{lost.cause}, and {often} (--max-restarts {self.limit})", lost.lines, lost.trains
            ) from lost
        self.used += 1
        log.warning("%s; it is replaced (%d of %d times)", lost, self.used, self.limit)


def short_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that a process found too little memory, of its machine or of a GPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


async def gathered(calls: Any) -> list[Any]:
    """The results in order. The first error is raised at once; the other calls then go on unheard."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return list(await asyncio.gather(*tasks))


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results, in order, of calls that workers answer together. Waits for all of them; of their errors the loss of a worker is raised
    first, because its peers only report a broken connection."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    deadline: float | None = None
    try:
        while waiting := [task for task in tasks if not task.done()]:
            if any(isinstance(error, WorkerLost) for error in _errors(tasks)):
                break
            if deadline is None and _errors(tasks):
                deadline = time.monotonic() + GRACE
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    errors = _errors(tasks)
    if errors:
        raise next((error for error in errors if isinstance(error, WorkerLost)), errors[0])
    return [task.result() for task in tasks]


def _errors(tasks: Iterable[asyncio.Future[Any]]) -> list[BaseException]:
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in done if (error := task.exception()) is not None]


def agreed(what: str, found: Mapping[str, Any]) -> Any:
    """The one value of several workers, by name.

    Raises:
        RuntimeError: they differ.
    """
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise RuntimeError(f"{what} differs: " + ", ".join(f"{name} has {value}" for name, value in found.items()))
    return values[0]
