"""How long a worker may take before it counts as lost, and waiting that long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

#: In how many pieces a wait is cut. A driver that is stopped or busy for a while wakes up late in one piece only, so that the time it
#: was away is not counted against a worker.
PIECES = 10
#: Calls that build a worker's parts: they may take as long as loading a model.
BUILDING = frozenset({"make", "digest", "listen", "join", "build", "real_layer", "check_parity"})


@dataclass(frozen=True)
class Patience:
    """Seconds until a worker counts as lost; None waits for ever.

    Attributes:
        call: for the answer to a call (``--worker-timeout``). Requests that are queued at an engine do not use it up as long as the
            engine answers others.
        build: for starting a process and building its parts (``--worker-build-timeout``).
        heartbeat: for a sign of life, whatever the worker computes (``--worker-heartbeat``).
    """

    call: float | None = None
    build: float | None = None
    heartbeat: float | None = None

    def of(self, method: str) -> float | None:
        """The limit of a call of ``method``."""
        return self.build if method in BUILDING else self.call


async def wait_for(answer: Awaitable[Any], seconds: float | None, *instead: asyncio.Future[Any]) -> Any:
    """The result of ``answer``, or the error of one of ``instead`` where that comes first.

    Raises:
        TimeoutExpired: it did not come within ``seconds``. ``answer`` is cancelled then.
    """
    task, pieces = asyncio.ensure_future(answer), 0
    piece = None if seconds is None else seconds / PIECES
    try:
        while not task.done():
            await asyncio.wait({task, *instead}, timeout=piece, return_when=asyncio.FIRST_COMPLETED)
            for other in instead:
                if other.done() and not task.done():
                    other.result()
            pieces += 1
            if pieces >= PIECES and piece is not None and not task.done():
                raise TimeoutExpired
        return task.result()
    finally:
        if not task.done():
            task.cancel()


class TimeoutExpired(Exception):
    """``wait_for`` ran out of time; not a ``TimeoutError``, which the awaited call may raise itself."""
