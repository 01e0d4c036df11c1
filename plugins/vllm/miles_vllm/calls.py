"""The requests in flight at an engine, and the gate that holds new ones while the engine is paused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

#: Numbers of requests of this process, whose engines may share a vLLM.
_NUMBERS = itertools.count()


@dataclass(eq=False)
class Call:
    """One request.

    Attributes:
        key: ``Request.key``.
        number: its number among the requests of this process.
        sent: vLLM has it; otherwise it waits for the gate.
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
        cancel: ends the request with this number at vLLM; returns when it has been answered.
    """

    def __init__(self, cancel: Callable[[int], Awaitable[None]]) -> None:
        self._cancel = cancel
        self._calls: dict[int, Call] = {}
        self._open = asyncio.Event()

    @contextmanager
    def add(self, key: int) -> Iterator[Call]:
        """Register a request as long as the context lasts."""
        call = Call(key, next(_NUMBERS))
        self._calls[call.number] = call
        try:
            yield call
        finally:
            del self._calls[call.number]
            call.done.set()

    @property
    def any_sent(self) -> bool:
        """Whether vLLM has any request."""
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
        """End the requests with these keys, None for all, that exist now, and wait until they have been answered."""
        wanted = [call for call in self._calls.values() if keys is None or call.key in keys]
        for call in wanted:
            call.aborted = True
            call.changed.set()
        await asyncio.gather(*(self._cancel(call.number) for call in wanted if call.sent))
        await asyncio.gather(*(call.done.wait() for call in wanted))
