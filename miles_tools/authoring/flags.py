"""Generate the reference page of flags: ``python -m miles_tools.authoring.flags > docs/flags.md``.

The page lists core's flags or, with names of installed plugins as arguments, the flags of these plugins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from miles_core.config.flags import metavar, shown_default
from miles_core.config.schema import CORE, Flag, Schema, collect
from miles_core.plugin.discovery import discover
from miles_core.plugin.manifest import Plugin

INTRODUCTION = """# Flags

Written by `python -m miles_tools.authoring.flags`; do not edit. The flags of a plugin are in the plugin's documentation
and, once it is installed, in `miles train --help`.

Every flag is also a key of a configuration file (`--config run.yaml`, YAML or TOML), as a table's key
(`rollout: {batch_size: 32}`) or as the flag without its dashes (`rollout-batch-size: 32`). Flags override files, later
files override earlier ones, and files override environment variables. Switches have a `--no-` form; lists take commas or
repeated flags; `none` clears an optional value. Rules, `miles plan` and error messages use the name in the first column."""


def page(manifests: Iterable[Plugin], owners: Iterable[str] = (CORE,)) -> str:
    """Return the Markdown page with the options of ``owners``. Choices include those that the plugins in ``manifests`` provide."""
    schema = collect(manifests)
    wanted = set(owners)
    parts = [INTRODUCTION]
    for table, group in schema.groups.items():
        if schema.owners[table] in wanted:
            parts.append(f"## {table}\n\n{_summary(group)}\n\n{_rows(schema, table)}")
    aliases = [alias for alias in schema.aliases.values() if alias.owner in wanted]
    if aliases:
        lines = [f"- `{a.spelling}`: {', '.join(f'{p} = {v}' for p, v in a.values.items())}" for a in aliases]
        parts.append("## Short forms\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _summary(group: type) -> str:
    return " ".join((group.__doc__ or "").split())


def _rows(schema: Schema, table: str) -> str:
    lines = ["| name | flag | default | meaning |", "|---|---|---|---|"]
    for option in schema.options.values():
        if option.group == table:
            lines.append(_row(schema.flag_of(option.path), option.fact))
    return "\n".join(lines)


def _row(flag: Flag, name: str) -> str:
    option = flag.option
    spelling = flag.spelling if option.is_bool else f"{flag.spelling} {metavar(option)}"
    spellings = ", ".join(f"`{text}`" for text in (spelling, *flag.aliases))
    default = f"`{shown_default(option)}`" if shown_default(option) else ("off" if option.is_bool else "")
    bounds = f" ({option.info.bounds()})" if option.info.bounds() else ""
    cells = (f"`{name}`", spellings, default, option.info.help + bounds)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def standard() -> list[Plugin]:
    """The installed plugins that take part in every run."""
    return [plugin for plugin in discover().values() if plugin.standard]


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(page(discover().values(), sys.argv[1:]))
    else:
        sys.stdout.write(page(standard()))
