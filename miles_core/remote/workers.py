"""How processes of one kind are reached: the part of a runtime that is its own."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from miles_core.errors import CheckpointError, ConfigError, MilesError, PlanError, PluginError, WorkerLost

log = logging.getLogger(__name__)


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

    A runtime says how one is reached (``send``) and replaced (``renew``). It is sent to ranks, which reach engines through it: there
    it is asked to ``send`` only.

    Args:
        names: one for each, as messages and metrics call it.
        patience: seconds until a worker that does not answer a call counts as lost; None waits for ever.
        trains: they hold trained weights.
        busy: told about every call.
    """

    def __init__(
        self, names: Sequence[str], patience: float | None = None, trains: bool = False, busy: Busy | None = None
    ) -> None:
        self.names, self.patience, self.trains = tuple(names), patience, trains
        self.busy = busy or Busy()

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    async def send(self, number: int, method: str, *args: Any) -> Any:
        """What ``Worker.answer(method, *args)`` returns in that process, or raises there. WorkerLost when it died."""

    @abstractmethod
    async def renew(self, number: int) -> None:
        """End what is left of a worker and make a new one in its place, not built yet."""

    @abstractmethod
    async def end(self) -> None:
        """End all processes, at once."""

    def share(self, value: Any) -> Any:
        """``value`` as it is best passed to several calls; the worker finds the value itself."""
        return value

    async def host(self) -> str:
        """The address under which other workers reach number 0."""
        return "127.0.0.1"

    def lines(self, number: int) -> tuple[str, ...]:
        """What a worker wrote last, for messages."""
        return ()

    async def call(self, number: int, method: str, *args: Any, named: str = "") -> Any:
        """``send``, and WorkerLost for a worker that does not answer in time; messages call the call ``named``."""
        return await self.answered(number, self.send(number, method, *args), named or method)

    async def answered(self, number: int, answer: Awaitable[Any], named: str) -> Any:
        """What a worker was asked: counted as its work while it is out, WorkerLost when it does not come in time or the worker died,
        and errors that a user can mend with the worker's name."""
        name = self.names[number]
        try:
            with self.naming(number), self.busy.at(name):
                async with asyncio.timeout(self.patience) as limit:
                    return await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.lost(number, f"it did not answer {named!r} within {self.patience:g} s") from None
        except WorkerLost as lost:
            if lost.worker:
                raise
            raise WorkerLost(name, lost.cause, lost.lines, self.trains) from None

    @contextmanager
    def naming(self, number: int) -> Iterator[None]:
        """Errors of the body that a user can mend say which worker they are of."""
        try:
            yield
        except (ConfigError, PlanError, PluginError, CheckpointError) as error:
            raise type(error)(f"worker {self.names[number]}: {error}") from None
        except Exception as error:
            if not short_of_memory(error):
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
        """The error that says so."""
        return WorkerLost(self.names[number], cause, self.lines(number), self.trains)


class Restarts:
    """How many workers a run may still replace."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def spend(self, lost: WorkerLost) -> None:
        """Allow one more, or raise ``lost`` with what that means."""
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


def agreed(what: str, found: Mapping[str, Any]) -> Any:
    """The one value of several workers, by name.

    Raises:
        RuntimeError: they differ.
    """
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise RuntimeError(f"{what} differs: " + ", ".join(f"{name} has {value}" for name, value in found.items()))
    return values[0]
