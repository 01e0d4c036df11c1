"""The command line: split arguments into assignments, and format ``--help``.

Types are checked later, together with the values of files, so that all sources produce the same error messages
(docs/decisions/0002-configuration-parser.md).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from miles_core.config import foreign_flags
from miles_core.config.command import TRAIN
from miles_core.config.schema import CORE, Flag, Option, Schema

CONFIG = "--config"
_NEGATIVE = re.compile(r"-\.?\d")


class Source(IntEnum):
    """Sources of values, in ascending precedence."""

    ENVIRONMENT = 1
    FILE = 2
    FLAG = 3


@dataclass(frozen=True)
class Assignment:
    """One value for one option (or one key of a pass-through table), not yet checked.

    Attributes:
        path: option path.
        raw: the unchecked value.
        origin: origin in messages: ``"--lr 1e-6"``, ``"run.yaml line 4"``.
        source: kind of origin.
        spelling: the flag or alias; different spellings with different values for one option are a conflict.
        rank: precedence within a source (later files win).
        chosen: whether the user set it; False for saved defaults of an earlier run.
        passthrough: whether the path belongs to a pass-through table, which accepts any key.
    """

    path: str
    raw: Any
    origin: str
    source: Source
    spelling: str
    rank: int = 0
    chosen: bool = True
    passthrough: bool = False


@dataclass
class CommandLine:
    """A parsed command line: assignments, names of configuration files, and error messages."""

    assignments: list[Assignment] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def new_help(command: str = "miles train", extra: Sequence[tuple[str, str]] = ()) -> argparse.ArgumentParser:
    """Return a parser that only formats help, with the flags of the command itself.

    Args:
        extra: (flag, help) of switches that the command handles.
    """
    parser = argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [--config FILE] [--plugins NAME,...] [options]",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    general = parser.add_argument_group("command")
    general.add_argument(CONFIG, metavar="FILE", help="YAML or TOML file; later ones and flags win")
    general.add_argument("--help", "-h", action="store_true", help="show this help")
    for switch, text in extra:
        general.add_argument(switch, action="store_true", help=_escape(text))
    return parser


def build_help(
    schema: Schema,
    command: str = "miles train",
    extra: Sequence[tuple[str, str]] = (),
    chosen: Collection[str] | None = None,
) -> argparse.ArgumentParser:
    """Return a parser that only formats help: the groups of core, then those of each plugin.

    Args:
        extra: see ``new_help``.
        chosen: spellings of the flags and aliases to include; None includes all of them.
    """
    parser = new_help(command, extra)
    shown: set[str] = set()

    def taken(spelling: str) -> bool:
        if spelling in shown or not (chosen is None or spelling in chosen):
            return False
        shown.add(spelling)
        return True

    tables = [(flag, {option.group for option in flag.options}) for flag in schema.distinct_flags()]
    for table, group in schema.groups.items():
        owner = schema.owners[table]
        flags = [flag for flag, places in tables if table in places and taken(flag.spelling)]
        aliases = [
            alias.spelling
            for alias in schema.aliases.values()
            if alias.owner == owner
            and (owner != CORE or next(iter(alias.values)).partition(".")[0] == table)
            and taken(alias.spelling)
        ]
        if not flags and not aliases:
            continue
        summary = (group.__doc__ or "").strip().split("\n")[0]
        title = table if owner == CORE else f"{table} (plugin {owner})"
        section = parser.add_argument_group(
            title, _escape(summary if owner == CORE else schema.manifests[owner].summary)
        )
        for flag in flags:
            add_flag(section, flag)
        for spelling in aliases:
            _add_alias(section, schema, spelling)
    section = parser.add_argument_group("short forms")
    for spelling in [alias for alias in schema.aliases if taken(alias)]:
        _add_alias(section, schema, spelling)
    return parser


def _add_alias(section: Any, schema: Schema, spelling: str) -> None:
    alias = schema.aliases[spelling]
    values = {option.path: value for path, value in alias.values.items() if (option := schema.find(path))}
    text = ", ".join(f"{path} = {value}" for path, value in values.items())
    section.add_argument(spelling, action="store_true", help=_escape(f"sets {text}"))


def add_flag(section: Any, flag: Flag) -> None:
    """Add a flag to an argparse group of ``--help``; of a switch the positive form."""
    value: dict[str, Any] = {"action": "store_true"} if flag.option.is_bool else {"metavar": metavar(flag.option)}
    section.add_argument(flag.spelling, *flag.aliases, help=_escape(describe(flag)), **value)


def metavar(option: Option) -> str:
    """Return the placeholder of a flag's value in ``--help``: the declared one, the choices, or one for the type."""
    if option.info.metavar:
        return option.info.metavar
    if option.choices:
        return "{" + ",".join(str(choice) for choice in option.choices) + "}"
    word = {int: "N", float: "X"}.get(option.inner, "PATH" if "Path" in str(option.inner) else "TEXT")
    return "N,..." if option.is_list else word


def shown_default(option: Option) -> str:
    """Return the default as typed on the command line; empty if there is none."""
    value = option.default
    if value is None or value == () or value == [] or (option.is_bool and value is False):
        return ""
    if option.is_bool:
        return "on"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def describe(flag: Flag) -> str:
    """Return the help, default and owners of a flag in one line."""
    option = flag.option
    notes = []
    if shown_default(option):
        notes.append(f"default: {shown_default(option)}")
    if option.is_bool and option.default:
        notes.append(f"--no-{flag.spelling[2:]} turns it off")
    if len(set(flag.owners)) > 1:
        notes.append(f"shared by {', '.join(flag.owners)}")
    if option.info.enables:
        notes.append(f"enables the plugin {option.owner}")
    return option.info.help + (f" ({'; '.join(notes)})" if notes else "")


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def parse(schema: Schema, argv: Sequence[str], own: Sequence[str] = TRAIN.flags) -> CommandLine:
    """Split ``argv`` into assignments. Undeclared words produce error messages in ``problems``. own: the command's own flags."""
    line = CommandLine()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, given, value = word.partition("=")
        if is_value(word):
            line.problems.append(foreign_flags.explain_word(word))
        elif fixed := _assign_fixed(schema, name):
            line.assignments += [] if given else fixed
            line.problems += [_explain_value(schema, name, value)] if given else []
        else:
            if not given and words and is_value(words[0]):
                given, value = " ", words.pop(0)
            _assign(schema, name, value if given else None, line, own)
    return line


def is_value(word: str) -> bool:
    """Whether a word of a command line is not a flag. Only numbers and texts with spaces may begin with a dash."""
    return not word.startswith("-") or word == "-" or bool(_NEGATIVE.match(word)) or " " in word.partition("=")[0]


def _assign_fixed(schema: Schema, name: str) -> list[Assignment]:
    """Return the assignments of an alias, of a switch and of its ``--no-`` form; none for other flags."""
    if name in schema.aliases:
        values = [(schema.find(path), value) for path, value in schema.aliases[name].values.items()]
        rank = int(len(values) > 1)  # a flag with several values describes a whole run, so it replaces other flags
        return [Assignment(o.path, value, name, Source.FLAG, name, rank) for o, value in values if o is not None]
    positive = name if name in schema.flags else name.replace("--no-", "--", 1)
    flag = schema.flags.get(positive)
    if flag is None or not flag.option.is_bool:
        return []
    return [Assignment(o.path, positive == name, name, Source.FLAG, flag.spelling) for o in flag.options]


def _explain_value(schema: Schema, name: str, value: str) -> str:
    positive = name.replace("--no-", "--", 1)
    forms = name if name in schema.aliases else f"{positive} or {positive.replace('--', '--no-', 1)}"
    return f"{name} takes no value, and has {value!r}; write {forms}"


def _assign(schema: Schema, name: str, value: str | None, line: CommandLine, own: Sequence[str]) -> None:
    """Add the assignments of a flag with a value, a file or a problem to ``line``. value: None if the flag has none."""
    flag = schema.flags.get(name)
    passed = schema.passthrough_of(name) if flag is None else None
    if passed is not None:
        raw = True if value is None else parse_natural(value)
        origin = name if value is None else f"{name} {value}"
        line.assignments.append(Assignment(".".join(passed), raw, origin, Source.FLAG, name, passthrough=True))
    elif flag is None and name != CONFIG:
        line.problems.append(foreign_flags.explain_flag(name, schema, own))
    elif value is None:
        line.problems.append(f"{name} needs a value; one that begins with a dash is written {name}=VALUE")
    elif flag is None:
        line.files.append(value)
    else:
        origin = f"{name} {value}"
        line.assignments += [Assignment(o.path, value, origin, Source.FLAG, flag.spelling) for o in flag.options]


def parse_natural(text: str) -> Any:
    """Parse a pass-through value as JSON (numbers, true and false included); return it as text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
