"""The requests in flight at an engine, and the gate that holds new ones while the engine is paused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

#: Numbers of requests of this process, whose engines may share a program.
_NUMBERS = itertools.count()
#: Seconds between two attempts to end the same requests.
_AGAIN_S = 0.5


def next_number() -> int:
    """Return a number that no other request of this process has."""
    return next(_NUMBERS)


@dataclass(eq=False)
class Call:
    """One request.

    Attributes:
        key: ``Request.key``.
        number: its number among the requests of this process.
        sent: the program has it; otherwise it waits for the gate.
        aborted: it must end.
        changed: set with ``aborted``, to wake a request that waits.
        done: set when it has been answered.
    """

    key: int
    number: int
    sent: bool = False
    aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Calls:
    """All requests of one engine, sent or waiting.

    Args:
        cancel: ends the request with this number in the program.
    """

    def __init__(self, cancel: Callable[[int], Awaitable[None]]) -> None:
        self._cancel = cancel
        self._calls: dict[int, Call] = {}
        self._open = asyncio.Event()

    @contextmanager
    def add(self, key: int, number: int) -> Iterator[Call]:
        """Register a request as long as the context lasts; ``number`` is of ``next_number``."""
        call = self._calls[number] = Call(key, number)
        try:
            yield call
        finally:
            del self._calls[number]
            call.done.set()

    @property
    def any_sent(self) -> bool:
        """Whether the program has any request."""
        return any(call.sent for call in self._calls.values())

    def open(self) -> None:
        """Let requests through."""
        self._open.set()

    def close(self) -> None:
        """Hold requests that have not been sent."""
        self._open.clear()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold new requests inside the context; open the gate again if it was open."""
        was_open = self._open.is_set()
        self.close()
        try:
            yield
        finally:
            if was_open:
                self.open()

    async def wait(self, call: Call) -> None:
        """Wait until the gate is open or the request is aborted."""
        while not self._open.is_set() and not call.aborted:
            waiting = [asyncio.ensure_future(event.wait()) for event in (self._open, call.changed)]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()

    async def abort(self, keys: Collection[int] | None = None) -> None:
        """End the requests with these keys, None for all, that exist now, and wait until they have been answered. Repeats because a request may
        reach the program after the attempt to end it."""
        calls = [call for call in self._calls.values() if keys is None or call.key in keys]
        for call in calls:
            call.aborted = True
            call.changed.set()
        while calls := [call for call in calls if not call.done.is_set()]:
            await asyncio.gather(*(self._cancel(call.number) for call in calls if call.sent))
            waiting = [asyncio.ensure_future(call.done.wait()) for call in calls]
            for task in (await asyncio.wait(waiting, timeout=_AGAIN_S))[1]:
                task.cancel()
