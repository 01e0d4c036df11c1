"""How an engine speaks to SGLang: a call by the name of an endpoint of its HTTP server, with that endpoint's body.

``process`` keeps an ``sglang.Engine`` in a process of its own, ``server`` speaks to a server that runs already. What they
have in common is this, so the engine does not know which one it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from miles_core.plugin import MilesError
from miles_sglang.answers import Answer


class SglangError(MilesError):
    """SGLang refused a call, or is not there any more."""


class SglangLost(SglangError):
    """SGLang's process ended unasked: ``cause`` says how, ``lines`` are the last ones that it wrote."""

    def __init__(self, cause: str, lines: tuple[str, ...] = ()) -> None:
        super().__init__(cause + (":\n  " + "\n  ".join(lines) if lines else ""))
        self.cause, self.lines = cause, lines


class Link(ABC):
    """A way to one SGLang.

    Attributes:
        same_host: it runs on this machine, in a process that can read this one's tensors.
    """

    same_host: bool = False

    @abstractmethod
    async def start(self) -> Mapping[str, Any]:
        """Bring SGLang up, or find it; returns its ``server_info`` (``context_length``, ``tp_size``, ...).

        Raises:
            SglangError: it does not come up; says why."""

    @abstractmethod
    async def stop(self) -> None:
        """Let it go. Safe to call twice, and after a failed ``start``."""

    @abstractmethod
    async def generate(self, body: Mapping[str, Any]) -> Answer:
        """The answer of the endpoint ``generate``; errors as of ``call``."""

    @abstractmethod
    async def call(self, endpoint: str, body: Mapping[str, Any], payload: bytes | memoryview = b"") -> Any:
        """The answer of one other endpoint, e.g. ``flush_cache``.

        Raises:
            SglangError: SGLang refused it.
            SglangLost: it ended before it answered."""

    async def restart(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """End SGLang, or what is left of it, and bring it up as at first but for ``changes`` of its arguments; returns what
        ``start`` does."""
        raise SglangError("this SGLang was not started here, so it cannot be started anew")

    def quantize(self, shape: tuple[int, int], numbers: bytes) -> bytes:
        """Activations [tokens, K], float32, as SGLang's own kernel rounds them to FP8 in groups of 128, dequantised. Waits."""
        raise SglangError("this SGLang was not started here, so its kernels cannot be asked")
