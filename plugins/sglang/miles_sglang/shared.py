"""One SGLang for several engines, each with an adapter of its own (transport ``adapter``).

All engines share the base. Nothing that one engine does stops the requests of another: pausing holds its own requests only, and SGLang
loads and unloads adapters while others generate. The ids of requests begin with a prefix per engine, because SGLang aborts by id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError, SglangLost
from miles_workers.servers import PoolNews

#: Calls that would stop the requests of all engines. The engine holds or aborts its own requests before it makes them, and SGLang keeps
#: cached prefixes apart by adapter.
_OF_ALL = frozenset({"pause_generation", "continue_generation", "flush_cache"})


class SharedServer:
    """An SGLang that several engines use.

    Args:
        link: connection to SGLang.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.lock = link, asyncio.Lock()
        self.users: set[SharedLink] = set()
        self.starts = 0
        self.info: Mapping[str, Any] = {}


class SharedLink(Link):
    """The link of one engine to a ``SharedServer``: the first to start starts SGLang, the last to stop stops it."""

    def __init__(self, server: SharedServer) -> None:
        self._server, self._start = server, 0
        self._prefix = secrets.token_hex(4)  # also apart from other runs that use the same server

    @property
    def same_host(self) -> bool:  # type: ignore[override]
        return self._server.link.same_host

    @property
    def news(self) -> PoolNews | None:  # type: ignore[override]
        return self._server.link.news

    def span(self, machines: int, index: int, address: str) -> None:
        self._server.link.span(machines, index, address)

    async def start(self) -> Mapping[str, Any]:
        server = self._server
        async with server.lock:
            if not server.users:
                server.info = await server.link.start()
                server.starts += 1
            server.users.add(self)
            self._start = server.starts
            return server.info

    async def stop(self) -> None:
        server = self._server
        async with server.lock:
            if self in server.users:
                server.users.remove(self)
                if not server.users:
                    await server.link.stop()

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Restart SGLang, unless another engine has done so since this one used it."""
        server = self._server
        async with server.lock:
            if self._start == server.starts:
                server.info = await server.link.restart(changes)
                server.starts += 1
            self._start = server.starts
            return server.info

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        self._check_current()
        return await self._server.link.generate(self._mark(body))

    async def generate_each(self, body: Mapping[str, Any]) -> Mapping[str, Answer]:
        self._check_current()
        return await self._server.link.generate_each(self._mark(body))

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        self._check_current()
        if endpoint in _OF_ALL:
            return {"success": True}
        if endpoint.startswith("update_weights"):
            raise SglangError(f"{endpoint} would change the base, which all adapters of this SGLang share")
        return await self._server.link.call(endpoint, self._mark(body), payload)

    def _mark(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**body, "rid": self._prefix + body["rid"]} if "rid" in body else body

    def _check_current(self) -> None:
        if self._start != self._server.starts:
            raise SglangLost("SGLang was restarted by another policy's engine, and has no adapter of this policy")


def share(servers: dict[str, SharedServer], key: str, connect: Callable[[], Link]) -> SharedLink:
    """Return a link to the SGLang of a key; ``connect`` makes the connection for the first engine."""
    if key not in servers:
        servers[key] = SharedServer(connect())
    return SharedLink(servers[key])
