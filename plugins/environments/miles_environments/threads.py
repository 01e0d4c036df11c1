"""Calls of code that may block, in threads that do not keep the program from ending.

What such a thread prints is discarded. A thread cannot be ended: after a time-out it goes on unobserved, and its result is dropped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from miles_environments.environment import EnvironmentFault

T = TypeVar("T")
_NAME = "miles-environment"


class Calls:
    """Calls of environments, limited in number and time.

    Args:
        concurrency: largest number of calls at once; calls after a time-out do not count.
        seconds: time limit of a call; it begins when the call starts.
    """

    def __init__(self, concurrency: int, seconds: float) -> None:
        self.seconds = seconds
        self._free = asyncio.Semaphore(concurrency)

    async def __call__(self, what: str, function: Callable[[], T]) -> T:
        """Call a function.

        Raises:
            EnvironmentFault: it raised, or takes too long; names ``what``.
        """
        async with self._free:
            limit = asyncio.timeout(self.seconds)
            try:
                async with limit:
                    return await in_thread(function)
            except EnvironmentFault:
                raise
            except Exception as error:
                if limit.expired():
                    raise EnvironmentFault(
                        f"{what} took longer than {self.seconds:g} seconds (--environment-seconds)"
                    ) from None
                raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}".rstrip(": ")) from error


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread and wait for the result. SystemExit and the like are raised as RuntimeError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    process = os.getpid()

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
        except StopIteration as stop:  # a future cannot hold it
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        if os.getpid() != process:  # a fork of the environment came back
            os._exit(0)
        with suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=call, name=_NAME, daemon=True).start()
    return await future


class Quiet:
    """Standard output without what the threads of environments print."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, unless the thread belongs to an environment."""
        if threading.current_thread().name == _NAME:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def silence() -> Callable[[], None]:
    """Discard what threads of environments print; returns a function that restores the streams."""
    before = sys.stdout, sys.stderr
    mine = Quiet(before[0]), Quiet(before[1])
    sys.stdout, sys.stderr = mine

    def restore() -> None:
        if (sys.stdout, sys.stderr) == mine:
            sys.stdout, sys.stderr = before

    return restore
