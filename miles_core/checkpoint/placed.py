"""A directory whose files are gathered where nobody looks, and put in their place when all of them are there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from miles_core.checkpoint.hf_files import CONFIG

#: What a new file system holds before anybody wrote to it.
_FRESH = frozenset({"lost+found"})


def gathering(final: Path, word: str) -> Path:
    """The hidden directory in which the files of ``final`` are gathered: beside it; or in it where it is there already,
    because a mount point cannot be replaced and the directory around it may be on another disk or closed."""
    return final / f".{word}" if final.is_dir() else final.parent / f".{final.name}.{word}"


def taken(final: Path, work: Path, own: Iterable[str] = ()) -> bool:
    """Whether something is at ``final`` that is not ours: neither ``work`` nor one of the names ``own``."""
    if not final.exists():
        return False
    return not final.is_dir() or bool({p.name for p in final.iterdir()} - {work.name, *own} - _FRESH)


def locked(work: Path) -> int:
    """Make ``work`` where it is not there, and keep other processes out of it until the returned descriptor is closed.

    Raises:
        BlockingIOError: another process is in.
    """
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def place(work: Path, final: Path, without: str = "") -> None:
    """Give the files of ``work`` their place, ``config.json`` last: a checkpoint without it is none.

    Args:
        work: as ``gathering`` says; gone afterwards.
        final: holds nothing else that is called like these files.
        without: a file of ``work`` that is dropped when the others have their place.
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
