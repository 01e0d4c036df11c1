"""The LoRA adapter of an engine whose weight updates consist of adapters only (transport ``adapter``).

The program is started with the base model from the checkpoint, and several policies may share it (``shared``). Each version of an adapter is
loaded under a name of its own, requests name it, and the previous version is unloaded; cached prefixes are kept apart by name, so no prefix
of an earlier version is used.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles_workers.renewal import EngineLost
from miles_workers.servers.errors import ServerError

#: Key of a message of the transport: name of the adapter. The other keys are ``config`` (peft's configuration; None for a policy that
#: computes with the base alone) and ``tensors`` (a safetensors file as bytes).
ADAPTER = "adapter"
#: How long the end of a run waits for a server to unload an adapter.
_LEAVE_SECONDS = 30.0


class ServedAdapter(ABC):
    """The adapter that applies to the requests of one engine.

    Attributes:
        name: its name in requests; empty without an adapter.
        version: its version; -1 before the first update.
    """

    def __init__(self) -> None:
        self.name, self.version = "", -1
        self._numbers, self._owner = itertools.count(), secrets.token_hex(4)  # other runs may use the same server

    @abstractmethod
    async def add(self, name: str, message: Mapping[str, Any], version: int) -> None:
        """Load the adapter of a message under a new name. Raises MilesError if it is rejected."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Unload an adapter."""

    def forget(self) -> None:
        """The program was restarted, and has no adapter."""
        self.name, self.version = "", -1

    async def leave(self) -> None:
        """Unload the adapter from a program that outlives this engine."""
        name, self.name = self.name, ""
        if name:
            with suppress(ServerError, EngineLost, TimeoutError):  # it has ended, or does not answer
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self.remove(name)

    async def load(self, message: Mapping[str, Any], version: int) -> None:
        """Load the adapter of a message, if it has one, and unload the previous one.

        Raises:
            MilesError: it was rejected; the previous adapter remains.
        """
        name = ""
        if message["config"] is not None:
            name = f"{message[ADAPTER]}-{version}-{self._owner}-{next(self._numbers)}"
            await self.add(name, message, version)
        previous, self.name, self.version = self.name, name, version
        if previous:
            await self.remove(previous)
