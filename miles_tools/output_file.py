"""Writes the pages of commands to a run directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from miles_core.errors import MilesError
from miles_core.redact import redact, show_controls


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file in one piece. A symbolic or hard link of that name is replaced: what it leads to keeps its content.

    Args:
        content: bytes, or text from which credentials are removed and whose control characters are made visible.

    Raises:
        MilesError: the file cannot be written.
    """
    data = show_controls(redact(content)).encode() if isinstance(content, str) else content
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".miles-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise MilesError(
            f"{path} cannot be written ({error.strerror}); free space there, or check its permissions"
        ) from error


def make_folder(path: Path) -> None:
    """Make a directory unless it exists.

    Raises:
        MilesError: there is a file or a link of that name.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise MilesError(
            f"{path} is a {'link' if path.is_symlink() else 'file'}, and a directory is written there: remove it"
        )
    path.mkdir(parents=True, exist_ok=True)
