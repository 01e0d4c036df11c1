"""One vLLM for several engines, each with an adapter of its own (``miles_workers.servers.shared``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import MilesError
from miles_vllm.link import Link
from miles_workers.servers import PoolNews, Shared, Use

#: Calls that would stop the requests of all engines. The engine holds or aborts its own requests before it makes them, and vLLM keeps cached
#: prefixes apart by adapter.
_OF_ALL = frozenset({"pause", "resume"})


class SharedLink(Link):
    """The link of one engine to a vLLM that several engines use.

    Args:
        server: the vLLM.
    """

    def __init__(self, server: Shared[Link]) -> None:
        self._use = Use(server, "vLLM")

    @property
    def news(self) -> PoolNews | None:  # type: ignore[override]
        return self._use.link.news

    async def start(self) -> int | None:
        context: int | None = await self._use.start()
        return context

    async def stop(self) -> None:
        await self._use.stop()

    async def restart(self) -> None:
        """Restart vLLM, unless another engine has done so since this one used it."""
        await self._use.restart(lambda link: link.restart())

    async def call(self, method: str, *args: Any) -> Any:
        link = self._use.current()
        if method in _OF_ALL:
            return None
        if method == "receive":
            raise MilesError("an update of all weights would change the base, which all adapters of this vLLM share")
        return await link.call(method, *args)

    async def call_each(self, method: str, *args: Any) -> Mapping[str, Any]:
        return await self._use.current().call_each(method, *args)
