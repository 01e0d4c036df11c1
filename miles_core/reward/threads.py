"""Threads for users' functions, which may never return."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """Runs blocking calls in threads that start on demand and are reused.

    The threads are daemons: a call that never returns does not delay the exit of the process. With ``ThreadPoolExecutor`` it would, because
    Python joins the executor's threads at exit.

    Args:
        limit: the largest number of threads; further calls wait for one.
        name: prefix of the threads' names.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit, self._name, self._started = limit, name, 0
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        weakref.finalize(self, self._calls.put, None)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function(*arguments)`` in a thread and return its result. If the caller is cancelled, the result is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                result, error = function(*arguments), None
            except BaseException as raised:
                result, error = None, raised
            with suppress(RuntimeError):  # the loop is closed: the run has ended
                loop.call_soon_threadsafe(_finish, future, result, error)

        self.put(work)
        return await future

    def put(self, work: Callable[[], None]) -> None:
        """Call ``work``, which raises no error, in a thread, and return at once."""
        self._calls.put(work)
        if not self._idle.acquire(blocking=False) and self._started < self.limit:
            self._started += 1
            name = f"{self._name}_{self._started}"
            threading.Thread(target=_serve, args=(self._calls, self._idle), name=name, daemon=True).start()


def _serve(calls: SimpleQueue[Callable[[], None] | None], idle: threading.Semaphore) -> None:
    while (work := calls.get()) is not None:
        work()
        del work  # it references the call's arguments
        idle.release()
    calls.put(None)  # for the other threads


def _finish(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
