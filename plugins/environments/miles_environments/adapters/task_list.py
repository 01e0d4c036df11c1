"""The tasks of a task set of verifiers by number."""

from __future__ import annotations

from typing import Any

from miles_core.plugin import ConfigError


class TaskList:
    """The tasks of a task set by number; an endless one (``length`` is None) is read on demand."""

    def __init__(self, taskset: Any, where: str) -> None:
        self._source = iter(taskset)
        self._read: list[Any] = list(self._source) if taskset.bounded else []
        self.length = len(self._read) if taskset.bounded else None
        if self.length == 0:
            raise ConfigError(f"{where}: it has no tasks")

    def __getitem__(self, number: int) -> Any:
        while len(self._read) <= number:
            self._read.append(next(self._source))
        return self._read[number]
