"""The interface between the engine and vLLM. A call has the name of a method of ``host.Host``, and its arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from miles_workers.servers import PoolNews


class Link(ABC):
    """A connection to one vLLM, or to running servers as one.

    Attributes:
        news: what happened to the servers; None if this run starts vLLM.
    """

    news: PoolNews | None = None

    @abstractmethod
    async def start(self) -> int | None:
        """Start vLLM or connect to it, and prepare it for updates.

        Returns:
            maximum tokens of prompt and response that it takes; None if the run determines it.

        Raises:
            EngineLost: it does not start.
            ServerError: a server cannot be used.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop vLLM or disconnect. Safe to call twice."""

    @abstractmethod
    async def restart(self) -> None:
        """Start a vLLM that died again, or continue with the servers that are left."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of ``Host``.

        Raises:
            EngineLost: vLLM died, or no server has the weights of a request.
            ServerLeft: the server of a request left; another one can answer it.
        """

    async def call_each(self, method: str, *args: Any) -> Mapping[str, Any]:
        """Call a method on every server: address -> answer. A single vLLM is named ""."""
        return {"": await self.call(method, *args)}
