"""One vLLM or SGLang, or one pool of servers, for several engines, each with an adapter of its own (transport ``adapter``).

All engines share the base. Nothing that one engine does stops the requests of another: pausing holds its own requests only, and adapters are
loaded and unloaded while others generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from miles_workers.renewal import EngineLost

T = TypeVar("T")


class Startable(Protocol):
    """A connection to the program."""

    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


L = TypeVar("L", bound=Startable)


class Shared(Generic[L]):
    """A program that several engines use.

    Args:
        link: connection to it.
    """

    def __init__(self, link: L) -> None:
        self.link, self.lock = link, asyncio.Lock()
        self.users: set[object] = set()
        self.starts = 0
        self.info: Any = None


class Use(Generic[L]):
    """The use of a program by one engine: the first to start starts it, the last to stop stops it.

    Args:
        shared: the program.
        name: its name in messages.
    """

    def __init__(self, shared: Shared[L], name: str) -> None:
        self._shared, self._name, self._start = shared, name, 0

    @property
    def link(self) -> L:
        """The connection, also before the start."""
        return self._shared.link

    async def start(self) -> Any:
        """Start the program if no engine has; returns what its start returned."""
        shared = self._shared
        async with shared.lock:
            if not shared.users:
                shared.info = await shared.link.start()
                shared.starts += 1
            shared.users.add(self)
            self._start = shared.starts
            return shared.info

    async def stop(self) -> None:
        """Stop the program if no other engine uses it."""
        shared = self._shared
        async with shared.lock:
            if self in shared.users:
                shared.users.remove(self)
                if not shared.users:
                    await shared.link.stop()

    async def restart(self, restart: Callable[[L], Awaitable[Any]]) -> Any:
        """Restart the program, unless another engine has done so since this one used it."""
        shared = self._shared
        async with shared.lock:
            if self._start == shared.starts:
                shared.info = await restart(shared.link)
                shared.starts += 1
            self._start = shared.starts
            return shared.info

    def current(self) -> L:
        """Return the connection. Raises EngineLost if the program was restarted since this engine used it."""
        if self._start != self._shared.starts:
            raise EngineLost(
                f"{self._name} was restarted by another policy's engine, and has no adapter of this policy"
            )
        return self._shared.link


def share(shared: dict[str, Shared[L]], key: str, connect: Callable[[], L]) -> Shared[L]:
    """Return the program of a key; ``connect`` makes the connection for the first engine."""
    if key not in shared:
        shared[key] = Shared(connect())
    return shared[key]
