"""Ending a run that was asked to stop, in limited time and whatever state it is in."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from miles_core.errors import MilesError

log = logging.getLogger(__name__)

#: Share of the time after which what is under way is given up, and after which the process ends itself.
GIVE_UP, EXIT = 0.4, 0.93
#: Seconds in which the event loop must react; else the main thread computes, and is interrupted there.
REACTION = 0.5


class OutOfTime(MilesError):
    """A run that was asked to stop did not reach the end of its step in time."""


class Deadline:
    """Gives a run that was asked to stop a limited time.

    First what is under way is given up: the task is cancelled, or, where it blocks the main thread, ``OutOfTime`` is raised there. The loop
    then saves the last completed step, where its weights are reachable. A process that has not ended shortly before the limit ends
    itself.

    Args:
        seconds: the limit (``--stop-within``).
        exit: called right before the process ends itself, from another thread.
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
        """The result of ``coroutine``. OutOfTime where it was given up."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self.expired:
                raise
            raise self._error() from None

    def begin(self, number: int) -> None:
        """The time runs from now on; called by the handler of signal ``number``. Later calls change nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._guard, args=(number,), name="deadline", daemon=True)
            self._thread.start()

    def interrupt(self, number: int, frame: object) -> None:
        """The handler of the signal that the guard sends to a main thread that does not react."""
        if not self._reacted.is_set() and not self._over.is_set():
            self._reacted.set()
            raise self._error()

    def close(self) -> None:
        """The run has ended."""
        self._over.set()

    def _guard(self, number: int) -> None:
        start = time.monotonic()
        if self._over.wait(self.seconds * GIVE_UP):
            return
        self.expired = True
        log.warning("the step under way is not complete after %g s: it is given up", self.seconds * GIVE_UP)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel)
        if not self._reacted.wait(REACTION) and not self._over.is_set():
            signal.pthread_kill(self._main, signal.SIGALRM)
        if self._over.wait(max(0.0, start + self.seconds * EXIT - time.monotonic())):
            return
        self._exit()
        os._exit(128 + number)

    def _cancel(self) -> None:
        if not self._reacted.is_set():
            self._reacted.set()
            if self._task is not None:
                self._task.cancel()

    def _error(self) -> OutOfTime:
        return OutOfTime(
            f"the step under way was given up {self.seconds * GIVE_UP:g} s after the signal (--stop-within {self.seconds:g})"
        )
