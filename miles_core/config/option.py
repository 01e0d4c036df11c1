"""One option: a dataclass field that becomes a flag, a configuration-file key and a fact.

Core's groups and every plugin's config are plain dataclasses whose fields are made with ``option(...)``. From that one
declaration follow the flag, its help, its YAML/TOML key, its validation, the fact ``<group>.<field>`` and its origin.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "miles"


@dataclass(frozen=True)
class OptionInfo:
    """What ``option(...)`` adds to a dataclass field; see there."""

    help: str
    flag: str = ""
    choices: tuple = ()
    aliases: tuple[str, ...] = ()
    enables: bool = False
    metavar: str = ""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    flag: str = "",
    choices: tuple = (),
    aliases: tuple[str, ...] = (),
    enables: bool = False,
    metavar: str = "",
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare one option of a configuration dataclass.

    Args:
        default: its value when nobody sets it.
        help: one line for ``--help``.
        flag: the flag's spelling; by default ``--`` and the field's name with dashes.
        choices: the values allowed; ``"*"`` as last entry allows names that plugins add.
        aliases: further spellings of the flag.
        enables: giving this flag enables the plugin that owns it (``--use-r3``).
        metavar: what ``--help`` shows for the value.
    """
    info = OptionInfo(help, flag, tuple(choices), tuple(aliases), enables, metavar)
    kwargs: dict[str, Any] = {"metadata": {METADATA_KEY: info}}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, **kwargs)
    return dataclasses.field(default=default, **kwargs)
