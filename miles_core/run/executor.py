"""The threads of ``asyncio.to_thread`` and ``run_in_executor`` during a run.

Users' functions call them, too. With asyncio's own executor a call that never returns keeps a run that ends with an error, and then the
process, alive: asyncio waits for the executor's threads (without a limit before Python 3.12), and so does the interpreter when it exits.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from miles_core.reward.threads import DaemonThreads

log = logging.getLogger(__name__)

#: Seconds that the end of a run waits for calls whose results nothing awaits, such as the rest of a write that was cancelled.
PATIENCE = 5.0


class DaemonExecutor(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` (asyncio accepts no other type) whose threads are daemons, and whose ``shutdown`` waits for a limited time."""

    def __init__(self) -> None:
        super().__init__(limit := min(32, (os.cpu_count() or 1) + 4))
        self._given_up = False
        self._threads_of_calls = DaemonThreads(limit, "to_thread")
        self._running: dict[Future[Any], str] = {}
        self._change = threading.Condition()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in a thread."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._change:
                    del self._running[future]
                    self._change.notify_all()

        with self._change:
            self._running[future] = _name(fn, args)
        self._threads_of_calls.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for calls in progress, at most ``PATIENCE`` seconds; log those that are dropped."""
        for future in list(self._running):
            future.cancel()  # has no effect on a call that has begun
        with self._change:
            returned = self._change.wait_for(lambda: self._given_up or not wait or not self._find_calls(), PATIENCE)
            names = sorted(set(self._find_calls()))
        if not returned:
            log.warning(
                "the run ends without waiting for %s, called in a thread, which did not return within %g s",
                ", ".join(names),
                PATIENCE,
            )

    def give_up(self) -> None:
        """Let ``shutdown`` wait no longer."""
        with self._change:
            self._given_up = True
            self._change.notify_all()

    def _find_calls(self) -> list[str]:
        """Return the names of the calls in progress."""
        return [name for future, name in self._running.items() if not future.cancelled()]


def _name(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the name of a function; ``asyncio.to_thread`` submits ``partial(context.run, function, ...)``."""
    if isinstance(function, functools.partial) and function.args:
        function = function.args[0]
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name
