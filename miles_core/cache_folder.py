"""The user's folder for what later runs reuse: compiled kernels, bytecode of imports, and offsets of rows in prompt files.

It is ``~/.cache/miles``, or ``miles`` in the folder ``XDG_CACHE_HOME``. The environment variable ``MILES_CACHE`` names another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which may not exist. Raises RuntimeError for a user without a home directory."""
    if named := environment.get("MILES_CACHE"):
        return Path(named).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles"
