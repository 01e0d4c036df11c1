"""SGLang again, after its process died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from miles_sglang.link import SglangLost

log = logging.getLogger(__name__)

Found = TypeVar("Found")

#: Set in the task that makes SGLang anew, and in those that it starts: they may not wait for themselves.
_HERE: ContextVar[bool] = ContextVar("_HERE", default=False)


class Renewal:
    """Makes SGLang anew when it is found dead, once for everybody who finds it.

    Args:
        spend: counts one more start; raises the WorkerLost that there may be none.
        renew: brings SGLang up, with weights; SglangLost when it dies again meanwhile.
    """

    def __init__(self, spend: Callable[[SglangLost], None], renew: Callable[[], Awaitable[None]]) -> None:
        self._spend, self._renew = spend, renew
        self._times = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def here(self) -> bool:
        """Whether this is asked by the renewal itself."""
        return _HERE.get()

    async def whole(self) -> None:
        """Wait until SGLang is there again."""
        if self._task is not None and not self.here:
            await asyncio.shield(self._task)

    async def asked(self, ask: Callable[[], Awaitable[Found]]) -> Found:
        """What ``ask`` returns, asked again of a new SGLang as often as one dies over it.

        Raises:
            WorkerLost: it may not be made anew, or not again.
        """
        while True:
            await self.whole()
            times = self._times
            try:
                return await ask()
            except SglangLost as lost:
                if self.here:
                    raise
                await self.after(lost, times)

    @property
    def times(self) -> int:
        """How often it was made anew; to be read before SGLang is asked, for ``after``."""
        return self._times

    async def after(self, lost: SglangLost, times: int) -> None:
        """Make anew what was lost since ``times`` was read; errors as of ``asked``."""
        if times == self._times:
            if self._task is None:
                self._task = asyncio.create_task(self._anew(lost))
            await asyncio.shield(self._task)

    async def _anew(self, lost: SglangLost) -> None:
        _HERE.set(True)
        try:
            while True:
                self._spend(lost)
                try:
                    await self._renew()
                    log.warning("SGLang was started again and has its weights; what was in flight is asked for again")
                    return
                except SglangLost as again:
                    lost = again
        finally:
            self._times += 1
            self._task = None
