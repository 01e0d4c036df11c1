"""Selects the rows of prompt files that are checked before a run, and caches the positions of rows between runs.

Before a run starts, it checks every row of its prompt files and renders every prompt. Of large files it checks and renders a sample, so
that a run with millions of rows starts soon; the others are checked when they are read, and left out with a warning if they are invalid.
Positions of rows in large files are stored in ``prompts`` in the cache folder, under a key that depends on everything they were computed
from, and later runs map them into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.cache_folder import cache_folder

#: Files with fewer rows are checked completely by every run, which takes seconds.
ROWS = 50_000
#: Number of rows of larger files that are checked before the run.
SAMPLE = 10_000

log = logging.getLogger(__name__)


def sample_rows(count: int) -> Sequence[int]:
    """Return which of ``count`` rows are checked before a run: all, or ``SAMPLE`` at equal distances with the first and the last one."""
    if count < ROWS:
        return range(count)
    return [number * (count - 1) // (SAMPLE - 1) for number in range(SAMPLE)]


def load_index(*key: Any) -> np.ndarray | None:
    """Return the array that was stored under ``key`` (JSON data), memory-mapped; None if there is none."""
    try:
        stored: np.ndarray = np.load(_path(key), mmap_mode="r")
        return stored
    except (OSError, ValueError, EOFError):  # absent, or damaged: it is computed and stored again
        return None


def store_index(array: np.ndarray, *key: Any) -> None:
    """Store an array under ``key`` if it has at least ``ROWS`` rows. A directory that is not writable is logged."""
    if len(array) < ROWS:
        return
    path = _path(key)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.save(file, array)
        part.replace(path)
    except OSError as error:
        log.info("%s cannot be written (%s): the next run checks the prompts again", path, error.strerror)


def _path(key: tuple[Any, ...]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return cache_folder() / "prompts" / f"{name}.npy"
