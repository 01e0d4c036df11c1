"""Restarts an engine's process after it died, and repeats the calls that were lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from miles_core.contracts.engine import Engine
from miles_core.errors import MilesError, WorkerLost
from miles_workers.restarts import Restarts

log = logging.getLogger(__name__)

Found = TypeVar("Found")

#: True in the task that restarts SGLang and in the tasks that it starts; these must not wait for the restart.
_HERE: ContextVar[bool] = ContextVar("_HERE", default=False)


class EngineLost(MilesError):
    """An engine's process ended unexpectedly.

    Attributes:
        cause: description of the failure.
        lines: the last lines of its log.
    """

    def __init__(self, cause: str, lines: tuple[str, ...] = ()) -> None:
        super().__init__(cause + (":\n  " + "\n  ".join(lines) if lines else ""))
        self.cause, self.lines = cause, lines


class Renewal:
    """Restarts an engine's process once for all callers that find it dead.

    Args:
        engine: the engine.
        program: name of the program that its process runs.
        restarts: counts the restarts.
        renew: restarts the process and sends it weights; raises EngineLost if it dies again.
    """

    def __init__(self, engine: Engine, program: str, restarts: Restarts, renew: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._program, self._restarts, self._renew = engine, program, restarts, renew
        self._times = 0
        self._task: asyncio.Task[None] | None = None

    def spend(self, lost: EngineLost) -> None:
        """Count one restart. Raises WorkerLost if none is left, or if the runtime replaces the whole engine."""
        if self._engine.resend is None:
            raise WorkerLost("", lost.cause, lost.lines) from lost
        self._restarts.spend(WorkerLost(self._program.lower(), lost.cause, lost.lines))

    @property
    def here(self) -> bool:
        """Whether the calling task belongs to the restart itself."""
        return _HERE.get()

    async def wait_until_renewed(self) -> None:
        """Wait for a restart in progress."""
        if self._task is not None and not self.here:
            await asyncio.shield(self._task)

    async def retry(self, ask: Callable[[], Awaitable[Found]]) -> Found:
        """Return the result of ``ask``, which is called again after a restart each time the process dies during the call.

        Raises:
            WorkerLost: no restart is left.
        """
        while True:
            await self.wait_until_renewed()
            times = self._times
            try:
                return await ask()
            except EngineLost as lost:
                if self.here:
                    raise
                await self.renew_after(lost, times)

    @property
    def times(self) -> int:
        """Number of restarts so far. Read it before a call to the process and pass it to ``renew_after``."""
        return self._times

    async def renew_after(self, lost: EngineLost, times: int) -> None:
        """Restart the process unless it was restarted since ``times`` was read. Raises the errors of ``retry``."""
        if times == self._times:
            if self._task is None:
                self._task = asyncio.create_task(self._run(lost))
            await asyncio.shield(self._task)

    async def _run(self, lost: EngineLost) -> None:
        _HERE.set(True)
        try:
            while True:
                self.spend(lost)
                try:
                    await self._renew()
                    log.warning(
                        "%s was restarted and has its weights; the requests in flight are sent again", self._program
                    )
                    return
                except EngineLost as again:
                    lost = again
        finally:
            self._times += 1
            self._task = None
