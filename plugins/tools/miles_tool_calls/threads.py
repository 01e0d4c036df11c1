"""Calls in threads that do not keep the program from ending: a tool may block forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread and wait for its result; SystemExit and the like are raised as RuntimeError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: Exception | None) -> None:
        if future.done():
            return  # the caller has given up
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def call() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except StopIteration as raised:  # a future cannot hold it
            error = RuntimeError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name="tool", daemon=True).start()
    return await future
