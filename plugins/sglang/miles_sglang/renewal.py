"""Restarts SGLang after its process died, and repeats the calls that were lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from miles_sglang.link import SglangLost

log = logging.getLogger(__name__)

Found = TypeVar("Found")

#: True in the task that restarts SGLang and in the tasks that it starts; these must not wait for the restart.
_HERE: ContextVar[bool] = ContextVar("_HERE", default=False)


class Renewal:
    """Restarts SGLang once for all callers that find it dead.

    Args:
        spend: counts one restart; raises WorkerLost if no restart is left.
        renew: restarts SGLang and sends it weights; raises SglangLost if it dies again.
    """

    def __init__(self, spend: Callable[[SglangLost], None], renew: Callable[[], Awaitable[None]]) -> None:
        self._spend, self._renew = spend, renew
        self._times = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def here(self) -> bool:
        """Whether the calling task belongs to the restart itself."""
        return _HERE.get()

    async def wait_until_renewed(self) -> None:
        """Wait for a restart in progress."""
        if self._task is not None and not self.here:
            await asyncio.shield(self._task)

    async def retry(self, ask: Callable[[], Awaitable[Found]]) -> Found:
        """Return the result of ``ask``, which is called again after a restart each time SGLang dies during the call.

        Raises:
            WorkerLost: no restart is left.
        """
        while True:
            await self.wait_until_renewed()
            times = self._times
            try:
                return await ask()
            except SglangLost as lost:
                if self.here:
                    raise
                await self.renew_after(lost, times)

    @property
    def times(self) -> int:
        """Number of restarts so far. Read it before a call to SGLang and pass it to ``renew_after``."""
        return self._times

    async def renew_after(self, lost: SglangLost, times: int) -> None:
        """Restart SGLang unless it was restarted since ``times`` was read. Raises the errors of ``retry``."""
        if times == self._times:
            if self._task is None:
                self._task = asyncio.create_task(self._run(lost))
            await asyncio.shield(self._task)

    async def _run(self, lost: SglangLost) -> None:
        _HERE.set(True)
        try:
            while True:
                self._spend(lost)
                try:
                    await self._renew()
                    log.warning("SGLang was restarted and has its weights; the requests in flight are sent again")
                    return
                except SglangLost as again:
                    lost = again
        finally:
            self._times += 1
            self._task = None
