"""The version of the installed SGLang, read without importing it."""

from __future__ import annotations

from importlib import metadata

#: The versions this plugin was tested with.
TESTED = ">=0.5.17,<0.5.18"
INSTALL = f"pip install 'sglang{TESTED}'"


def version() -> str | None:
    """Return the version of the installed SGLang; None if it is not installed."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
