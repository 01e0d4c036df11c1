"""One server of a pool."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from miles_core.redact import redact
from miles_workers.servers.errors import ServerLeft

T = TypeVar("T")


class Server(ABC):
    """A connection to a server.

    Attributes:
        url: its address.
    """

    url: str

    @abstractmethod
    async def start(self) -> Mapping[str, Any]:
        """Connect to the server; returns its description (``SameModel``).

        Raises:
            ServerError: it cannot be reached (NotReachable), or cannot serve this run.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Disconnect. Safe to call twice."""

    @abstractmethod
    async def version(self, timeout: float) -> str:
        """Return the version of the server's weights. Raises ServerError; NotReachable if there is no answer in time."""

    @abstractmethod
    async def abort(self, rid: str) -> Any:
        """End a request."""


S = TypeVar("S", bound=Server)


@dataclass(eq=False)
class Member(Generic[S]):
    """A server of a pool.

    Attributes:
        link, info: connection to it, and its description.
        serving: it takes requests.
        version: version of its weights; empty before the first update.
        adapters: names of the adapters that it has.
        open: number of open requests.
        pinged: a look at its process is in progress.
        gone, cause: set once it has left, with the reason.
    """

    link: S
    info: Mapping[str, Any]
    serving: bool = False
    version: str = ""
    adapters: set[str] = field(default_factory=set)
    open: int = 0
    pinged: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""

    def serves(self, adapter: str) -> bool:
        """Whether the server has the weights for a request; ``adapter`` is empty for a request without one."""
        return self.serving and (not adapter or adapter in self.adapters)

    async def until_gone(self, asked: Awaitable[T]) -> T:
        """Return the result of a call of the server. Raises ServerLeft if the server leaves meanwhile."""
        call, gone = asyncio.ensure_future(asked), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise ServerLeft(f"{redact(self.link.url)} left: {self.cause}")
        finally:
            call.cancel()
            gone.cancel()
