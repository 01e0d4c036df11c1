"""The transport contract: moving encoded weights from trainer to engine.

A transport is chosen by name (``make_transport``). Core ships the in-process copy; shared memory, device handles,
collectives and deltas are plugins. Bytes are counted there, on what travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from miles_core.data.unit import Encoded


@dataclass(frozen=True)
class SyncReport:
    """One weight sync: version, bytes that travelled, tensors, seconds."""

    version: int
    nbytes: int
    tensors: int
    seconds: float


class Transport(ABC):
    """Delivers one version of the weights to one engine. Made on every trainer rank and run there; an engine in another
    process is told to ``receive``."""

    #: every rank needs every unit (memory handles), not one rank each (broadcast, files)
    everywhere: bool = False

    @abstractmethod
    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        """Consume ``units``; when this returns the engine serves ``version``."""
