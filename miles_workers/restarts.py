"""Counts replaced workers against the limit of a run."""

from __future__ import annotations

import logging

from miles_core.errors import WorkerLost

log = logging.getLogger(__name__)


class Restarts:
    """Limits the number of workers that a run may replace."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.forbidden = limit, 0, False

    @property
    def left(self) -> bool:
        """Return whether another worker may be replaced."""
        return not self.forbidden and self.used < self.limit

    def forbid(self) -> None:
        """Allow no further replacements."""
        self.forbidden = True

    def spend(self, lost: WorkerLost) -> None:
        """Count a replacement, or raise ``lost`` with an explanation if the limit is reached."""
        if self.forbidden:
            raise lost
        if self.used >= self.limit:
            often = f"{self.used} workers were replaced before" if self.used else "no worker may be replaced"
            raise WorkerLost(
                lost.worker, f"{lost.cause}, and {often} (--max-restarts {self.limit})", lost.lines, lost.trains
            ) from lost
        self.used += 1
        log.warning("%s; it is replaced (%d of %d times)", lost, self.used, self.limit)
