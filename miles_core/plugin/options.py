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
    """What ``option`` adds to a dataclass field; the attributes are its arguments."""

    help: str
    flag: str = ""
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    enables: bool = False
    metavar: str = ""
    part: str = ""
    fact: str = ""
    gt: float | None = None
    ge: float | None = None
    le: float | None = None
    lt: float | None = None
    fixed: bool = False

    def bounds(self) -> str:
        """The allowed range as shown to users, e.g. ``"> 0, <= 1"``; empty when there is none."""
        limits = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    flag: str = "",
    choices: tuple[Any, ...] = (),
    aliases: tuple[str, ...] = (),
    enables: bool = False,
    metavar: str = "",
    part: str = "",
    fact: str = "",
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    fixed: bool = False,
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare one option of a configuration dataclass.

    Args:
        default: its value when nobody sets it.
        help: one line for ``--help``.
        flag: the flag's spelling; by default ``--`` and the field's name with dashes.
        choices: the values allowed; ``"*"`` as last entry allows names that plugins add.
        aliases: further spellings of the flag.
        enables: giving this flag enables the plugin that owns it (``--use-mine``).
        metavar: what ``--help`` shows for the value.
        part: which names ``"*"`` stands for: a kind of ``Plugin.provides`` (``"engine"``) or ``"format"`` for
            ``Plugin.formats``. A name that exactly one installed plugin provides enables that plugin.
        fact: the name in rules, where it is not ``<group>.<field>``.
        gt, ge, le, lt: bounds of a number (or of every number of a list).
        fixed: a run that is continued must have the same value: saved weights or states mean nothing under another.
    """
    info = OptionInfo(help, flag, tuple(choices), tuple(aliases), enables, metavar, part, fact, gt, ge, le, lt, fixed)
    kwargs: dict[str, Any] = {"metadata": {METADATA_KEY: info}}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, **kwargs)
    return dataclasses.field(default=default, **kwargs)
