"""The command line: build an argparse parser from the schema, and parse arguments to assignments.

argparse only splits the command line and formats ``--help``. Types are checked later, together with the values of files, so
that all sources produce the same error messages (measurements: docs/decisions/0002-configuration-parser.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from miles_core.config import foreign_flags
from miles_core.config.command import TRAIN
from miles_core.config.schema import CORE, Flag, Option, Schema
from miles_core.errors import ConfigError


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


class _Record(argparse.Action):
    """Records the typed value as an assignment, without converting it."""

    def __init__(self, *, flag: Flag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        typed = option_string or self.flag.spelling
        if self.flag.option.is_bool:
            values, origin = not typed.startswith("--no-") or typed in self.flag.aliases, typed
        else:
            origin = f"{typed} {values}"
        for option in self.flag.options:
            namespace.given.append(Assignment(option.path, values, origin, Source.FLAG, self.flag.spelling))


class _RecordAlias(argparse.Action):
    def __init__(self, *, values: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)
        self.values = values

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        typed = option_string or self.option_strings[0]
        for path, value in self.values.items():
            # a flag with several values describes a whole run, so it replaces other flags
            namespace.given.append(Assignment(path, value, typed, Source.FLAG, typed, int(len(self.values) > 1)))


def new_parser(command: str = "miles train", extra: Sequence[tuple[str, str]] = ()) -> _Parser:
    """Build a parser with the flags of the command itself only.

    Args:
        extra: (flag, help) of switches that the command handles, for ``--help`` only.
    """
    parser = _Parser(
        prog=command,
        usage=f"{command} [--config FILE] [--plugins NAME,...] [options]",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    general = parser.add_argument_group("command")
    general.add_argument(
        "--config", action="append", metavar="FILE", help="YAML or TOML file; later ones and flags win"
    )
    general.add_argument("--help", "-h", action="store_true", help="show this help")
    for switch, text in extra:
        general.add_argument(switch, action="store_true", help=_escape(text))
    return parser


def build_parser(
    schema: Schema,
    command: str = "miles train",
    extra: Sequence[tuple[str, str]] = (),
    chosen: Collection[str] | None = None,
) -> _Parser:
    """Build the parser. Its ``--help`` lists the groups of core, then those of each plugin.

    Args:
        extra: see ``new_parser``.
        chosen: spellings of the flags and aliases to include; None includes all of them.
    """
    parser = new_parser(command, extra)
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
    section.add_argument(
        spelling, action=_RecordAlias, values=values, dest=argparse.SUPPRESS, help=_escape(f"sets {text}")
    )


def add_flag(section: Any, flag: Flag) -> None:
    """Add a flag to an argparse group; of a switch, help shows the positive form and the parser takes both."""
    option = flag.option
    names = [flag.spelling, *flag.aliases]
    text = _escape(describe(flag))
    common: dict[str, Any] = {"action": _Record, "flag": flag, "dest": argparse.SUPPRESS}
    if not option.is_bool:
        section.add_argument(*names, metavar=metavar(option), help=text, **common)
        return
    section.add_argument(*names, nargs=0, help=text, **common)
    section.add_argument(*(f"--no-{name[2:]}" for name in names), nargs=0, help=argparse.SUPPRESS, **common)


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
    rest = _extract_passthrough(schema, argv, line)
    namespace = argparse.Namespace(given=line.assignments)
    # a parser of the flags in ``rest`` only; adding all of them takes longer than the rest of the parsing
    words = {word.partition("=")[0] for word in rest}
    words |= {f"--{word[5:]}" for word in words if word.startswith("--no-")}
    words |= {schema.flags[word].spelling for word in words & schema.flags.keys()}
    try:
        namespace, extras = build_parser(schema, chosen=words).parse_known_args(rest, namespace)
    except argparse.ArgumentError as error:
        line.problems.append(_explain_argument_error(error))
        return line
    line.files = namespace.config or []
    for token in _find_unknown(extras):
        line.problems.append(
            foreign_flags.explain_flag(token, schema, own)
            if token.startswith("-")
            else foreign_flags.explain_word(token)
        )
    return line


def _explain_argument_error(error: argparse.ArgumentError) -> str:
    names = (error.argument_name or "?").split("/")
    if "expected" in error.message:
        return f"{names[0]} needs a value; one that begins with a dash is written {names[0]}=VALUE"
    bare = names[0].removeprefix("--no-").removeprefix("--")
    return f"{names[0]} takes no value ({error.message}); write --{bare} or --no-{bare}"


def _find_unknown(extras: Sequence[str]) -> list[str]:
    """Return the unknown flags and words among the arguments that argparse did not parse, without values of unknown flags."""
    tokens = []
    after_flag = False
    for token in extras:
        is_flag = token.startswith("-") and not token.lstrip("-")[:1].isdigit()
        if is_flag or not after_flag:
            tokens.append(token.partition("=")[0] if is_flag else token)
        after_flag = is_flag and "=" not in token
    return tokens


def _extract_passthrough(schema: Schema, argv: Sequence[str], line: CommandLine) -> list[str]:
    """Convert flags that match only a pass-through prefix to assignments; returns the remaining arguments."""
    declared = set(schema.spellings())
    rest: list[str] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        name, equals, value = token.partition("=")
        target = schema.passthrough_of(name) if name not in declared else None
        if target is None:
            rest.append(token)
            continue
        if not equals and position < len(argv) and not argv[position].startswith("--"):
            value, equals = argv[position], "="
            position += 1
        raw = parse_natural(value) if equals else True
        origin = f"{name} {value}".strip()
        path = f"{target[0]}.{target[1]}"
        line.assignments.append(Assignment(path, raw, origin, Source.FLAG, name, passthrough=True))
    return rest


def parse_natural(text: str) -> Any:
    """Parse a pass-through value as JSON (numbers, true and false included); return it as text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
