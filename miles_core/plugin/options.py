"""Options: dataclass fields that define flags, configuration keys and facts.

Core's groups and every plugin's config are dataclasses whose fields are declared with ``option(...)``. Each declaration defines
the flag, its help, its YAML/TOML key, its validation and the fact ``<group>.<field>``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

METADATA_KEY = "miles"


@dataclass(frozen=True)
class OptionInfo:
    """The metadata that ``option`` adds to a dataclass field; the attributes are the arguments of ``option``."""

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
    only_if: str = ""

    def bounds(self) -> str:
        """Return the allowed range as shown to users, e.g. ``"> 0, <= 1"``; empty if there are no bounds."""
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
    only_if: str = "",
    default_factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare one option of a configuration dataclass.

    Args:
        default: the default value.
        help: one line for ``--help``.
        flag: the flag; by default ``--`` and the field's name with dashes.
        choices: the allowed values; ``"*"`` as last entry allows names that plugins add.
        aliases: alternative flags.
        enables: whether setting this option enables the plugin that owns it (``--use-mine``).
        metavar: placeholder of the value in ``--help``.
        part: the names that ``"*"`` allows: a kind of ``Plugin.provides`` (``"engine"``), or ``"format"`` for
            ``Plugin.formats``. A name that exactly one installed plugin provides enables that plugin.
        fact: the name in rules, if it is not ``<group>.<field>``.
        gt, ge, le, lt: bounds of a number (or of every number of a list).
        fixed: whether a resumed run must have the same value, because saved weights or states are invalid for another value.
        only_if: condition (``miles_core.plugin.rule``) without which the option has no effect, e.g. ``"reward.rm_type == remote"``. A
            run that sets the option without it is refused; see ``miles_core.config.effects``.
        default_factory: returns the default value, for mutable defaults.
    """
    info = OptionInfo(
        help, flag, tuple(choices), tuple(aliases), enables, metavar, part, fact, gt, ge, le, lt, fixed, only_if
    )
    kwargs: dict[str, Any] = {"metadata": {METADATA_KEY: info}}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, **kwargs)
    return dataclasses.field(default=default, **kwargs)
