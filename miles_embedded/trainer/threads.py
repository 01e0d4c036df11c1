"""Threads that compute together, on a machine that does other work."""

from __future__ import annotations

import logging
import os

import torch

log = logging.getLogger(__name__)


def tell_if_crowded() -> None:
    """Log a hint where other processes take cores that torch's threads count on: all threads of an operation wait, spinning, for
    the one that was put aside, so a step takes several times as long as with one thread."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    others = os.getloadavg()[0] - 1 if hasattr(os, "getloadavg") else 0.0  # one is this process itself
    if threads > 1 and others > max(0.5, cores - threads):
        log.info(
            "about %.0f other processes compute on the %d cores of this machine, and torch takes %d threads here: steps may take several "
            "times as long; OMP_NUM_THREADS=1 in the environment avoids it",
            max(others, 1),
            cores,
            threads,
        )
