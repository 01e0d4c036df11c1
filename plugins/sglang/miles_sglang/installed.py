"""The version of the installed SGLang, read without importing it."""

from __future__ import annotations

import os
import sys
from importlib import metadata

#: The versions this plugin was tested with.
TESTED = ">=0.5.17,<0.5.18"
INSTALL = f"pip install 'sglang{TESTED}'"


def version(python_path: str = "") -> str | None:
    """Return the version of the installed SGLang, or of the one in the directories of ``python_path``; None if there is none."""
    path = python_path.split(os.pathsep) if python_path else sys.path
    return next((found.version for found in metadata.distributions(name="sglang", path=path)), None)
