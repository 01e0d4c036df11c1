"""Flags of the plugins of this project, for command lines that use a plugin without its package."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.schema import Schema


def find_plugins(flag: str, schema: Schema) -> list[str]:
    """Return the plugins of this project that declare a flag. Empty if one of them is installed (``schema``), or if there are none."""
    found = [plugin for plugin, flags in _table().items() if any(fnmatchcase(flag, pattern) for pattern in flags)]
    return [] if any(plugin in schema.manifests for plugin in found) else found


def explain_installation(flag: str, schema: Schema) -> str:
    """Return an error message for a flag of a plugin that is not installed; empty for other flags."""
    found = find_plugins(flag, schema)
    if not found:
        return ""
    package = f"miles-plugin-{found[0].replace('_', '-')}"
    return (
        f"{flag} belongs to the plugin {' or '.join(found)}, which is not installed: pip install {package} "
        f"(in a checkout: pip install ./plugins/{found[0]})"
    )


@cache
def _table() -> dict[str, list[str]]:
    """Return plugin -> its flags, or patterns of them."""
    return tomllib.loads(files("miles_tools.foreign").joinpath("not_installed.toml").read_text(encoding="utf-8"))
