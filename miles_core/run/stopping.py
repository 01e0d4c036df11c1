"""Ends a run within a limited time after a stop request, whatever its state."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from miles_core.errors import OutOfTime
from miles_core.run.exits import leave

log = logging.getLogger(__name__)

#: Fractions of the limit: after GIVE_UP the current work is aborted, after EXIT the process exits.
GIVE_UP, EXIT = 0.4, 0.93
#: Seconds in which the event loop must react, at most this fraction of the limit. Otherwise the main thread is busy and is interrupted
#: with a signal.
REACTION, REACTION_FRACTION = 0.5, 0.1


class Deadline:
    """Limits the time that a run has after a stop request.

    First the current work is aborted: its task is cancelled or, if it blocks the main thread, ``OutOfTime`` is raised there. The
    loop then saves the last completed step if its weights are still available. If the process is still running shortly before the
    limit, it exits.

    Args:
        seconds: the limit (``--stop-within``).
        exit: called from another thread right before the process exits.
    """

    def __init__(self, seconds: float, exit: Callable[[], None]) -> None:
        self.seconds, self._exit = seconds, exit
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over, self._reacted = threading.Event(), threading.Event()
        self._main = threading.get_ident()
        self.expired = False

    async def limit(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await ``coroutine``; raise OutOfTime if the deadline aborted it."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self.expired:
                raise
            raise self._error() from None

    def begin(self, number: int) -> None:
        """Start the countdown; called by the handler of signal ``number``. Later calls have no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._guard, args=(number,), name="deadline", daemon=True)
            self._thread.start()

    def interrupt(self, number: int, frame: object) -> None:
        """Handler of the signal that the guard thread sends to an unresponsive main thread: raises OutOfTime once."""
        if not self._reacted.is_set() and not self._over.is_set():
            self._reacted.set()
            raise self._error()

    def close(self) -> None:
        """Stop the countdown: the run has ended."""
        self._over.set()

    def _guard(self, number: int) -> None:
        start = time.monotonic()
        if self._over.wait(self.seconds * GIVE_UP):
            return
        self.expired = True
        log.warning("the current step is not complete after %g s: aborting it", self.seconds * GIVE_UP)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)
        if not self._reacted.wait(min(REACTION, self.seconds * REACTION_FRACTION)) and not self._over.is_set():
            signal.pthread_kill(self._main, signal.SIGALRM)
        if self._over.wait(max(0.0, start + self.seconds * EXIT - time.monotonic())):
            return
        self._exit()
        leave(128 + number)

    def _cancel(self) -> None:
        if not self._reacted.is_set():
            self._reacted.set()
            if self._task is not None:
                self._task.cancel()

    def _error(self) -> OutOfTime:
        return OutOfTime(
            f"the current step was aborted {self.seconds * GIVE_UP:g} s after the signal (--stop-within {self.seconds:g})"
        )
