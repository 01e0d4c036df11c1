"""Detection of CPU contention between torch's threads and other processes."""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger(__name__)


def warn_if_crowded() -> None:
    """Log a hint if other processes compete for the cores of torch's threads. All threads of an operation spin while one of them is
    descheduled, so a step takes several times as long as with a single thread."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    others = os.getloadavg()[0] - 1 if hasattr(os, "getloadavg") else 0.0  # without this process itself
    if threads > 1 and others > max(0.5, cores - threads):
        log.info(
            "about %.0f other processes run on the %d cores of this machine, and torch uses %d threads here: steps may take several "
            "times as long; set OMP_NUM_THREADS=1 in the environment to avoid it",
            max(others, 1),
            cores,
            threads,
        )
