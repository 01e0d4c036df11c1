"""Timeouts after which a worker counts as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

#: Number of intervals into which a wait is divided. If the driver itself is suspended or busy, it oversleeps in one interval only, so
#: that its own delay does not use up the worker's timeout.
PIECES = 10
#: Calls that build a worker's parts. They may include loading a model and use the timeout ``Timeouts.build``.
BUILDING = frozenset({"make", "digest", "listen", "join", "build", "real_layer", "check_parity"})


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds after which a worker counts as lost; None waits for ever.

    Attributes:
        call: timeout of a call (``--worker-timeout``). For requests queued at an engine, it restarts with every response of the engine.
        build: timeout for starting a process and building its parts (``--worker-build-timeout``).
        heartbeat: timeout of heartbeats, which arrive also while the worker computes (``--worker-heartbeat``).
    """

    call: float | None = None
    build: float | None = None
    heartbeat: float | None = None

    def of(self, method: str) -> float | None:
        """Return the timeout of a call of ``method``."""
        return self.build if method in BUILDING else self.call


async def wait_for(answer: Awaitable[Any], seconds: float | None, *instead: asyncio.Future[Any]) -> Any:
    """Await ``answer``, or raise the error of one of ``instead`` if that completes first.

    Raises:
        TimeoutExpired: no result within ``seconds``; ``answer`` is then cancelled.
    """
    task, pieces = asyncio.ensure_future(answer), 0
    task.add_done_callback(ignore_error)  # an answer that arrives together with the end of this wait
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


def ignore_error(task: asyncio.Future[Any]) -> None:
    """Done callback of a task whose error may be of no interest: asyncio then does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


class TimeoutExpired(Exception):
    """``wait_for`` ran out of time; not a ``TimeoutError``, which the awaited call may raise itself."""
