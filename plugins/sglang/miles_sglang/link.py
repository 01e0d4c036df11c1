"""The interface between the engine and SGLang. A call has the name of an endpoint of SGLang's HTTP server, and the body of a request to it.

``process`` implements it with an ``sglang.Engine`` in a separate process, ``pool`` with running HTTP servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from miles_sglang.answers import Answer
from miles_workers import EngineLost
from miles_workers.servers import PoolNews, ServerError


class SglangError(ServerError):
    """SGLang rejected a call or is not running."""


class SglangLost(EngineLost, SglangError):
    """SGLang's process ended unexpectedly."""


class Link(ABC):
    """A connection to one SGLang.

    Attributes:
        same_host: SGLang runs on this machine and can read this process's tensors.
        news: what happened to the servers; None if this run starts SGLang.
    """

    same_host: bool = False
    news: PoolNews | None = None

    def span(self, machines: int, index: int, address: str) -> None:
        """See ``Engine.span``."""
        raise SglangError("this run did not start SGLang, so it cannot distribute it over machines")

    @abstractmethod
    async def start(self) -> Mapping[str, Any]:
        """Start SGLang or connect to it; returns its ``server_info`` (``context_length``, ``tp_size``, ...).

        Raises:
            SglangError: it does not start or cannot be reached; the message contains the cause."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop SGLang or disconnect. Safe to call twice, and after a failed ``start``."""

    @abstractmethod
    async def generate(self, body: Mapping[str, Any]) -> Answer:
        """Call the endpoint ``generate``. Raises the errors of ``call``, and ServerLeft if another server can answer."""

    @abstractmethod
    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        """Call another endpoint, e.g. ``flush_cache``, and return its answer.

        Raises:
            ServerError: SGLang rejected the call.
            EngineLost: SGLang ended before it answered."""

    async def generate_each(self, body: Mapping[str, Any]) -> Mapping[str, Answer]:
        """Call ``generate`` on every server: address -> answer. A single SGLang is named ""."""
        return {"": await self.generate(body)}

    def begin_update(self) -> None:
        """Called before the first call of an update of all weights."""

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stop SGLang or its remaining processes and start it with its first arguments, updated by ``changes``.

        Returns the same as ``start``."""
        raise SglangError("this run did not start SGLang, so it cannot restart it")

    def quantize(self, format: str, shape: tuple[int, int], numbers: bytes) -> bytes:
        """Quantise activations with SGLang's kernel and dequantise them. Blocks until done.

        Args:
            format: name of the number format.
            shape: (tokens, K).
            numbers: the activations as float32 bytes.

        Returns:
            the dequantised activations as float32 bytes.
        """
        raise SglangError("this run did not start SGLang, so it cannot call SGLang's kernels")
