"""Closes and ends workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import cast

from miles_runtime.worker import Worker
from miles_runtime.workers import RECORDER, Workers

#: Seconds that workers have to release their resources when the run ends, and after a stop request.
FAREWELL, FAREWELL_STOPPED = 10.0, 2.0
WORKER = cast(Worker, RECORDER)


async def close_workers(placed: Iterable[Workers], stopped: bool) -> None:
    """Let workers release their resources, and end them. stopped: the user requested a stop, so there is less time."""
    placed = [*placed]
    goodbyes = [asyncio.ensure_future(w.ask(number, WORKER.close())) for w in placed for number in range(len(w))]
    if goodbyes:  # workers that do not respond are ended anyway
        _, late = await asyncio.wait(goodbyes, timeout=FAREWELL_STOPPED if stopped else FAREWELL)
        for task in late:
            task.cancel()
        await asyncio.gather(*goodbyes, return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL):
            await asyncio.gather(*(workers.end() for workers in placed))
