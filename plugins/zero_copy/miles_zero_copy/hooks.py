"""Where zero_copy plugs in beside its transport: memory that killed runs left is freed, and its own when a run ends."""

from __future__ import annotations

import logging
from typing import Any

from miles_core import hookimpl
from miles_zero_copy.segment import DIRECTORY, free_leftovers
from miles_zero_copy.transport import OPEN

log = logging.getLogger(__name__)


class ZeroCopy:
    """Memory for weights, before and after a run."""

    @hookimpl
    def on_start(self) -> None:
        freed = free_leftovers()
        if freed:
            log.info("freed %d bytes of shared memory in %s that runs which were killed had left", freed, DIRECTORY)

    @hookimpl
    def on_stop(self, run: Any) -> None:
        for transport in run.stash.get(OPEN, []):
            transport.close()
