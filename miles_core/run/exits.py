"""Ensures that an incomplete run never exits with status 0, even if a user's function exits the process immediately.

``os._exit`` and ``os.exec*`` run no handler, no ``finally`` and no ``atexit``: without the replacements here, a reward that calls
``os._exit(0)`` would look like a complete run. Forks of the process, which end with ``os._exit`` as a rule, are not affected. Exits in C
code are not detected.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Ends the process at once.
leave = os._exit
#: The functions that the other functions of these families call.
_ENDING = ("_exit", "execv", "execve")


@contextmanager
def report_exits(report: Callable[[str], None]) -> Iterator[None]:
    """Replace the functions that exit the process immediately, for the duration of the context. A call in this process reports the function
    and its location, and exits with the given status, or 1 instead of 0. Args: report: called in the thread of the call, with a text such
    as ``os._exit(0) at judge.py:3``.
    """
    process = os.getpid()
    previous = {name: getattr(os, name) for name in _ENDING}

    def replace(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if os.getpid() != process:
                return previous[name](*arguments)
            caller = sys._getframe(1)
            with suppress(BaseException):
                report(f"os.{name}({arguments[0]!r}) at {caller.f_code.co_filename}:{caller.f_lineno}")
                sys.stderr.flush()
            leave((name == "_exit" and arguments[0]) or 1)

        return call

    for name in previous:
        setattr(os, name, replace(name))
    try:
        yield
    finally:
        for name, function in previous.items():
            setattr(os, name, function)


def locate_error(error: BaseException) -> str:
    """Return FILE:LINE of the place that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "place unknown"
