"""Where zero_copy plugs in beside its transport: memory that killed runs left is freed."""

from __future__ import annotations

import logging

from miles_core.plugin import hookimpl
from miles_zero_copy.segment import DIRECTORY, free_leftovers

log = logging.getLogger(__name__)


class ZeroCopy:
    """Before a run."""

    @hookimpl
    def on_start(self) -> None:
        freed = free_leftovers()
        if freed:
            log.info("freed %d bytes of shared memory in %s that runs which were killed had left", freed, DIRECTORY)
