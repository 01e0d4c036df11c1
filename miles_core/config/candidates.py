"""Find the plugins of a command line and collect their options: installed plugins and single files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from miles_core.config import file
from miles_core.config.flags import is_value
from miles_core.config.schema import ROOT, Schema, collect
from miles_core.errors import PluginError
from miles_core.plugin.discovery import Catalogue, discover, is_file


def collect_plugins(argv: Sequence[str], files: Mapping[str, list[file.Entry]]) -> Schema:
    """Return the schema of core, all installed plugins and the single files named by ``--plugins``.

    Excludes other plugins that cannot be imported or conflict with the named ones.

    Raises:
        PluginError: a plugin named by ``--plugins`` cannot be imported, or two of them conflict.
    """
    catalogue = discover()
    wanted = [catalogue.request(n) for n in _named_plugins(argv, files) if is_file(n) or n in catalogue]
    return _collect_compatible(catalogue, wanted)


def _collect_compatible(catalogue: Catalogue, wanted: Sequence[str]) -> Schema:
    """Collect the schema without plugins whose declaration of a flag, alias or environment variable contradicts that of another plugin.

    The ``wanted`` plugins are kept. The others are added by name, and a plugin that conflicts with one that was added before is excluded.
    ``Catalogue.broken`` records the reason, so an installed plugin with a conflict is an error only if a run uses it.
    """
    with suppress(PluginError):  # at least two plugins conflict
        return collect(catalogue)
    compatible = [catalogue[name] for name in wanted]
    collect(compatible)
    for plugin in [p for name, p in catalogue.items() if name not in wanted]:
        try:
            collect([*compatible, plugin])
            compatible.append(plugin)
        except PluginError as error:
            catalogue.exclude(plugin.name, str(error))
    return collect(catalogue)


def peek(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of one flag without a schema."""
    values = []
    for word, following in pairwise([*argv, "--"]):
        name, equals, value = word.partition("=")
        if name == flag and (equals or is_value(following)):
            values.append(value if equals else following)
    return values


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
