"""Staging directories, in which a directory is prepared before it is moved into place atomically. ``miles_formats.convert.placement`` moves
its files into place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

#: Entries of a newly created file system.
_FRESH = frozenset({"lost+found"})


def staging_path(final: Path, word: str) -> Path:
    """Return the path of the hidden staging directory for ``final``.

    It is a sibling of ``final``, or inside ``final`` if that directory exists: a mount point cannot be replaced, and its parent
    may be on another disk or not writable.
    """
    return final / f".{word}" if final.is_dir() else final.parent / f".{final.name}.{word}"


def is_occupied(final: Path, work: Path, own: Iterable[str] = ()) -> bool:
    """Whether ``final`` is a file, or a directory with entries other than ``work`` and the names in ``own``."""
    if not final.exists():
        return False
    return not final.is_dir() or bool({p.name for p in final.iterdir()} - {work.name, *own} - _FRESH)
