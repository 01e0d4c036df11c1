"""Generate the table of the flags of this project's plugins: ``python docs/write_plugin_flags.py > miles_tools/foreign/not_installed.toml``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles_core.config.schema import collect
from miles_core.plugin.discovery import discover

INTRODUCTION = """# Written by docs/write_plugin_flags.py; do not edit. Plugin = its flags, or patterns of them."""


def table() -> str:
    """Return the TOML table of all plugins below ``plugins``, which must be installed."""
    root = Path(__file__).parents[1] / "plugins"
    schema = collect(discover().values())
    found: dict[str, set[str]] = {path.parent.name: set() for path in sorted(root.glob("*/pyproject.toml"))}
    for spelling, flag in schema.flags.items():
        for owner in found.keys() & set(flag.owners):
            prefix = f"--{owner}-"
            found[owner].add(f"{prefix}*" if spelling.startswith(prefix) else spelling)
    for spelling, alias in schema.aliases.items():
        if alias.owner in found:
            found[alias.owner].add(spelling)
    rows = (f"{plugin} = {json.dumps(sorted(flags))}" for plugin, flags in found.items() if flags)
    return "\n".join([INTRODUCTION, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
