"""Write a directory atomically: fill a hidden staging directory, then move its files into place."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from miles_core.checkpoint.hf_files import CONFIG


def lock_directory(work: Path) -> int:
    """Create ``work`` if necessary and lock it. Closing the returned file descriptor releases the lock.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def move_into_place(work: Path, final: Path, without: str = "") -> None:
    """Move the files of ``work`` to ``final`` and remove ``work``.

    Moves ``config.json`` last, because a directory without it is not a checkpoint.

    Args:
        work: the staging directory (``staging_path``).
        final: the target directory; entries with the same names are replaced.
        without: name of a file in ``work`` to delete instead of moving, after all others are in place.
    """
    if work.parent != final:
        os.replace(work, final)
        if without:
            (final / without).unlink()
        return
    for entry in sorted(work.iterdir(), key=lambda e: (e.name == CONFIG, e.name)):
        if entry.name != without:
            if (final / entry.name).is_dir():
                shutil.rmtree(final / entry.name)
            os.replace(entry, final / entry.name)
    shutil.rmtree(work)
