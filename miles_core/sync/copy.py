"""The transport within one process: the engine copies each tensor into its own weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from miles_core.contracts.transport import SyncReport, Transport
from miles_core.data.unit import Encoded

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine


class CopyTransport(Transport):
    """Passes the stream to an engine in this process, which copies it to its own weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def send(self, units: Iterator[Encoded], version: int) -> SyncReport:
        started, nbytes, tensors = time.perf_counter(), 0, 0

        def count_sizes() -> Iterator[Encoded]:
            nonlocal nbytes, tensors
            for unit in units:
                nbytes += unit.nbytes
                tensors += len(unit.parts)
                yield unit

        await self.engine.update_weights(count_sizes(), version)
        return SyncReport(version, nbytes, tensors, time.perf_counter() - started)


def make_transport(engine: Engine) -> CopyTransport:
    """Create the transport named ``copy``."""
    return CopyTransport(engine)
