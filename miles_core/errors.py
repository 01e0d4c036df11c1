"""The errors a user can cause.

A ``MilesError`` carries one clear sentence: the value, where it came from, and what to do. The command
line prints it without a traceback and exits with status 2; everything else is a defect and keeps its traceback.
"""

from __future__ import annotations

from typing import Any


class MilesError(Exception):
    """A user's mistake, told in one sentence (value, origin, next step)."""


class ConfigError(MilesError):
    """A flag, a configuration file or a combination of options that cannot work."""


class PlanError(MilesError):
    """The plan is refused; ``problems`` holds every violation (see ``miles_core.plugin.resolve``)."""

    def __init__(self, message: str, problems: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class PluginError(MilesError):
    """A plugin that cannot be found, loaded or registered."""


class DataError(MilesError):
    """Prompts, labels or rewards that cannot be used."""


class CheckpointError(MilesError):
    """A checkpoint that is missing, malformed, incomplete or from another plan."""


class NonFiniteError(MilesError):
    """NaN or infinity where a number should be; names the first tensor that holds it."""


class SyncError(MilesError):
    """Weights that did not arrive as they were sent. The engine has no complete version; a new push gives it one."""


class MismatchError(MilesError):
    """Engine and trainer disagree beyond the tolerance (``gap``: ``miles_mismatch.gap.Gap``), or the engine serves
    older weights."""

    def __init__(self, message: str, gap: Any = None) -> None:
        super().__init__(message)
        self.gap = gap


class WorkerLost(MilesError):
    """A process of the run that died, or that stopped answering.

    Args:
        worker: its name; empty where the process itself says that it can do no more, and then whoever asked it adds the name.
        cause: what is known about it.
        lines: the last ones that it wrote.
        trains: it held a part of the trained weights, which only a checkpoint brings back.
    """

    def __init__(self, worker: str, cause: str, lines: tuple[str, ...] = (), trains: bool = False) -> None:
        super().__init__(worker, cause, lines, trains)  # as they are, so that it can be rebuilt in another process
        self.worker, self.cause, self.lines, self.trains = worker, cause, lines, trains

    def __str__(self) -> str:
        written = "".join(f"\n  {line}" for line in self.lines)
        return f"{f'worker {self.worker}' if self.worker else 'a worker'} was lost: {self.cause}" + (
            f"; its last lines:{written}" if written else ""
        )


def first_line(error: Exception) -> str:
    """What an error of other software says first, and the line after it where the first only leads to that; its type where it says nothing."""
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
