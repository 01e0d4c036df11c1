"""The errors a user can cause.

The message of a ``MilesError`` names the value, its origin, and what to do. The command line prints it without a
traceback and exits with status 2. Any other exception is a defect and keeps its traceback.
"""

from __future__ import annotations

import inspect
from typing import Any


class MilesError(Exception):
    """Base class of user errors. The message names the value, its origin and the next step.

    Attributes:
        worker: name of the worker process that raised the error; "" for the driver. The message starts with it.
        plugin: name of the plugin whose function raised the error; "" for core, None if unknown.
    """

    worker: str = ""
    plugin: str | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return f"worker {self.worker}: {text}" if self.worker else text


class ConfigError(MilesError):
    """An invalid flag, configuration file or combination of options."""


class PlanError(MilesError):
    """The plan was rejected; ``problems`` holds every violation, and ``sets`` the values that its plugins set (see
    ``miles_core.plugin.resolve``)."""

    def __init__(self, message: str, problems: tuple[Any, ...] = (), sets: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.problems, self.sets = problems, sets


class PluginError(MilesError):
    """A plugin that cannot be found, loaded or registered."""


class DataError(MilesError):
    """Prompts, labels or rewards that cannot be used."""


class CheckpointError(MilesError):
    """A checkpoint that is missing, malformed, incomplete or from another plan."""


class NonFiniteError(MilesError):
    """A tensor holds NaN or infinity; the message names the first such tensor."""


class SyncError(MilesError):
    """Weights did not arrive as sent. The engine holds no complete version until the next push."""


class MismatchError(MilesError):
    """Engine and trainer disagree beyond the tolerance, or the engine serves outdated weights.

    Attributes:
        gap: the measured difference, a ``miles_core.mismatch.gap.Gap``; None if none was measured.
    """

    def __init__(self, message: str, gap: Any = None) -> None:
        super().__init__(message)
        self.gap = gap


class WorkerLost(MilesError):
    """A worker process died or stopped responding.

    Args:
        worker: the worker's name; empty if the worker raises the error itself, in which case its caller adds the name.
        cause: why the worker was lost, as far as known.
        lines: the last lines of the worker's output.
        trains: whether the worker held part of the trained weights, which only a checkpoint restores.
    """

    def __init__(self, worker: str, cause: str, lines: tuple[str, ...] = (), trains: bool = False) -> None:
        super().__init__(worker, cause, lines, trains)  # the plain arguments, so that the error can be pickled
        self.worker, self.cause, self.lines, self.trains = worker, cause, lines, trains

    def __str__(self) -> str:
        output = "".join(f"\n  {line}" for line in self.lines)
        return f"{f'worker {self.worker}' if self.worker else 'a worker'} was lost: {self.cause}" + (
            f"; its last lines:{output}" if output else ""
        )


class OutOfTime(BaseException):
    """The run did not complete its step in time after a stop request. It is not an ``Exception``, so that code that converts errors of a
    model, a file or a user's function does not catch it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of other software, plus the second line if the first ends with a colon.

    For an error without a message, return the name of its type.
    """
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


def describe(value: Any) -> str:
    """Describe a value of a plugin or a user by its type and its shape, length or beginning."""
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        value.close()  # it is never awaited, and Python would warn
        return "a coroutine (from an async function)"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator (from a function with yield)"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {kind} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        inside = sorted({type(item).__name__ for item in value})
        return f"a {kind} of {len(value)}" + (f" ({', '.join(inside)})" if inside else "")
    return f"a {kind}, {value!r:.60}"
