"""Calls environments in threads, limited in number and time. Output of these threads is discarded."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from miles_core.chat import call_in_thread
from miles_core.data import describe_error
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
                    return await call_in_thread(function, _NAME)
            except EnvironmentFault:
                raise
            except Exception as error:
                if limit.expired():
                    raise EnvironmentFault(
                        f"{what} took longer than {self.seconds:g} seconds (--environment-seconds)"
                    ) from None
                raise EnvironmentFault(f"{what} raised {describe_error(error)}") from error


class Quiet:
    """Standard output that drops the output of the threads of environments."""

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
