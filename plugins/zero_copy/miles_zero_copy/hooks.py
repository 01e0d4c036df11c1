"""Hook that frees the shared memory that killed runs left behind."""

from __future__ import annotations

import logging

from miles_core.plugin import hookimpl
from miles_zero_copy.segment import DIRECTORY, free_leftovers

log = logging.getLogger(__name__)


class ZeroCopy:
    """Frees leftover shared memory before a run."""

    @hookimpl
    def on_start(self) -> None:
        freed = free_leftovers()
        if freed:
            log.info("freed %d bytes of shared memory in %s, left behind by killed runs", freed, DIRECTORY)
