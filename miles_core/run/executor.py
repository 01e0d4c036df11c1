"""The threads of ``asyncio.to_thread`` and ``run_in_executor`` during a run.

Users' functions call them, too. With asyncio's own executor a call that never returns keeps a run that ends with an error, and then the
process, alive: asyncio waits for the executor's threads (without a limit before Python 3.12), and so does the interpreter when it exits.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent import futures
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
        self._daemons = DaemonThreads(limit, "to_thread")
        self._running: dict[Future[Any], str] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` in a thread."""
        future: Future[Any] = Future()
        self._running[future] = _name(fn, args)
        future.add_done_callback(self._running.pop)

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._daemons.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel calls that have not begun and wait for the others, at most ``PATIENCE`` seconds; log those that are dropped."""
        calls = [future for future in list(self._running) if not future.cancel()]
        _, dropped = futures.wait(calls, PATIENCE if wait else 0)
        if names := sorted({name for call in dropped if (name := self._running.get(call))}):
            log.warning(
                "the run ends without waiting for %s, called in a thread, which did not return within %g s",
                ", ".join(names),
                PATIENCE,
            )


def _name(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the name of a function; ``asyncio.to_thread`` submits ``partial(context.run, function, ...)``."""
    if isinstance(function, functools.partial) and function.args:
        function = function.args[0]
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else name
