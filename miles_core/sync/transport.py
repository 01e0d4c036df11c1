"""Moving encoded weights from trainer to engine.

A transport is chosen by name (``make_transport``). Core ships the in-process copy; shared memory, CUDA IPC, NCCL and deltas are
plugins. Bytes are counted here, on what travels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.sync.unit import Encoded

if TYPE_CHECKING:
    from miles_core.rollout.engine import Engine


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


class CopyTransport(Transport):
    """Hands the stream to an engine in this process, which copies it into its own weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started, nbytes, tensors = time.perf_counter(), 0, 0

        def counted() -> Iterator[Encoded]:
            nonlocal nbytes, tensors
            for unit in units:
                nbytes += unit.nbytes
                tensors += len(unit.parts)
                yield unit

        await self.engine.update_weights(counted(), version)
        return SyncReport(version, nbytes, tensors, time.perf_counter() - started)


def make_transport(engine: Engine) -> CopyTransport:
    """The transport named ``copy``."""
    return CopyTransport(engine)
