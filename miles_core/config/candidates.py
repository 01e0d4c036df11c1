"""Find the plugins of a command line before its options are parsed: installed plugins and single files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.config import file
from miles_core.config.schema import ROOT, collect
from miles_core.errors import PluginError

if TYPE_CHECKING:
    from miles_core.plugin.discovery import Catalogue


def discover_plugins(argv: Sequence[str], files: Mapping[str, list[file.Entry]]) -> Catalogue:
    """Return the manifests of all installed plugins and of the single files named by ``--plugins``.

    Excludes other plugins that cannot be imported or conflict with the named ones.

    Raises:
        PluginError: a plugin named by ``--plugins`` cannot be imported, or two of them conflict.
    """
    from miles_core.plugin.discovery import discover

    catalogue = discover()
    wanted = [catalogue.request(n) for n in _named_plugins(argv, files) if is_local(n) or n in catalogue]
    _exclude_conflicting(catalogue, wanted)
    return catalogue


def _exclude_conflicting(catalogue: Catalogue, wanted: Sequence[str] = ()) -> None:
    """Exclude plugins that declare a flag, alias or variable of another plugin differently.

    Keeps the ``wanted`` plugins first, then the first by name. ``Catalogue.broken`` records the reason for each excluded plugin, so
    that an installed conflicting plugin is an error only if a run uses it.
    """
    try:
        collect(catalogue)
        return
    except PluginError:
        pass  # at least two plugins conflict
    compatible = [catalogue[name] for name in wanted]
    collect(compatible)
    for plugin in [p for name, p in catalogue.items() if name not in wanted]:
        try:
            collect([*compatible, plugin])
            compatible.append(plugin)
        except PluginError as error:
            catalogue.exclude(plugin.name, str(error))


def peek(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of one flag without a schema."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, action="append")
    try:
        known, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:  # the full parser reports the missing value
        return []
    return getattr(known, flag[2:]) or []


def _named_plugins(argv: Sequence[str], files: Mapping[str, list[file.Entry]]) -> list[str]:
    """Return the items of ``--plugins`` on the command line or, without the flag, in files."""
    named: list[Any] = [*peek(argv, "--plugins")]
    if not named:
        for entries in files.values():
            for entry in entries:
                inner = entry.children if entry.key == ROOT and entry.children is not None else (entry,)
                named += [e.value for e in inner if e.key.lstrip("-") == "plugins"]
    words = [word for item in named for word in (item if isinstance(item, list) else str(item).split(","))]
    return list(dict.fromkeys(str(word) for word in words if word))


def is_local(name: str) -> bool:
    """Whether an item of ``--plugins`` is the path of a single-file plugin."""
    return name.endswith(".py") or "/" in name or "\\" in name
