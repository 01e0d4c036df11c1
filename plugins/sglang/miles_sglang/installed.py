"""Which SGLang is installed here, asked without importing it."""

from __future__ import annotations

from importlib import metadata

#: The versions this plugin was tested with.
TESTED = ">=0.5.17,<0.5.18"
INSTALL = f"pip install 'sglang{TESTED}'"


def version() -> str | None:
    """The version of the installed SGLang; None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
