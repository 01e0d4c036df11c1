"""One SGLang for several engines, each with an adapter of its own (``miles_workers.servers.shared``).

The ids of requests begin with a prefix per engine, because SGLang aborts by id.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from miles_sglang.answers import Answer
from miles_sglang.link import Link, SglangError
from miles_workers.servers import PoolNews, Shared, Use

#: Calls that would stop the requests of all engines. The engine holds or aborts its own requests before it makes them, and SGLang keeps
#: cached prefixes apart by adapter.
_OF_ALL = frozenset({"pause_generation", "continue_generation", "flush_cache"})


class SharedLink(Link):
    """The link of one engine to an SGLang that several engines use.

    Args:
        server: the SGLang.
    """

    def __init__(self, server: Shared[Link]) -> None:
        self._use = Use(server, "SGLang")
        self._prefix = secrets.token_hex(4)  # also apart from other runs that use the same server

    @property
    def same_host(self) -> bool:  # type: ignore[override]
        return self._use.link.same_host

    @property
    def news(self) -> PoolNews | None:  # type: ignore[override]
        return self._use.link.news

    def span(self, machines: int, index: int, address: str) -> None:
        self._use.link.span(machines, index, address)

    async def start(self) -> Mapping[str, Any]:
        info: Mapping[str, Any] = await self._use.start()
        return info

    async def stop(self) -> None:
        await self._use.stop()

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Restart SGLang, unless another engine has done so since this one used it."""
        info: Mapping[str, Any] = await self._use.restart(lambda link: link.restart(changes))
        return info

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        return await self._use.current().generate(self._mark(body))

    async def generate_each(self, body: Mapping[str, Any]) -> Mapping[str, Answer]:
        return await self._use.current().generate_each(self._mark(body))

    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        link = self._use.current()
        if endpoint in _OF_ALL:
            return {"success": True}
        if endpoint.startswith("update_weights"):
            raise SglangError(f"{endpoint} would change the base, which all adapters of this SGLang share")
        return await link.call(endpoint, self._mark(body), payload)

    def _mark(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**body, "rid": self._prefix + body["rid"]} if "rid" in body else body
