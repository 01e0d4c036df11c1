"""Splits a command line into options with their values: flags, ``key=value`` words, and the entries of files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_tools.foreign import is_written_for, recognize

#: A word such as ``trainer.nnodes=1`` or ``+data.seed=2``.
_KEY = re.compile(r"(?P<name>[+~]{0,2}[A-Za-z_]\w*(?:\.[\w\[\]-]+)+)=(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True)
class Group:
    """An option with its values.

    Attributes:
        name: the option as typed; empty for words before the first option.
        words: its values.
        joined: whether name and value were one word.
    """

    name: str
    words: tuple[str, ...] = ()
    joined: bool = False

    @property
    def plain(self) -> str:
        """The option without the pluses of verl's ``+key=value``."""
        return self.name.lstrip("+~")

    @property
    def text(self) -> str:
        """The option as typed, with its values."""
        return "=".join([self.name, *self.words]) if self.joined else " ".join([self.name, *self.words])


def read_groups(argv: Sequence[str]) -> list[Group]:
    """Split a command line. A file of another program counts as the options that it holds."""
    groups: list[Group] = []
    for token in argv:
        if token == "--":
            continue
        key = _KEY.fullmatch(token)
        if key is not None:
            groups += [Group(key["name"], _values(key["value"]), True), Group("")]
        elif token.startswith("-") and not _NUMBER.match(token):
            name, equals, value = token.partition("=")
            groups.append(Group(name, _values(value) if equals else (), bool(equals)))
        elif groups:
            groups[-1] = Group(groups[-1].name, (*groups[-1].words, token), groups[-1].joined)
        else:
            groups.append(Group("", (token,)))
    return [inner for group in groups if group.name or group.words for inner in _expand(group)]


def _values(text: str) -> tuple[str, ...]:
    """Return the values of ``key=value``: the items of a list, without quotes."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            return tuple(map(str, json.loads(text.replace("'", '"'))))
        except ValueError:
            return tuple(item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip())
    return (text.strip("'\""),)


def _expand(group: Group) -> Iterator[Group]:
    """Yield the group, or the entries of the file if it names a file of another program."""
    files = [word for word in group.words if word.endswith((".toml", ".yaml", ".yml")) and Path(word).is_file()]
    entries = (
        [entry for file in files[:1] for entry in read_entries(Path(file))] if group.name in ("", "--config") else []
    )
    names = [entry.name for entry in entries]
    program = recognize(names)
    if program is None or not is_written_for(program, names):
        yield group
        return
    yield from entries


def read_entries(path: Path) -> list[Group]:
    """Return the entries of a TOML or YAML file as options; empty if it cannot be read. ``[[a.b]]`` becomes ``a.b[]``."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        else:
            import yaml

            content = yaml.safe_load(text)
    except (OSError, ValueError):
        return []
    return list(_flatten(content)) if isinstance(content, Mapping) else []


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[Group]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from _flatten(item, f"{prefix}{name}[].")
        else:
            items = value if isinstance(value, list) else [value]
            yield Group(f"{prefix}{name}", tuple("null" if item is None else str(item) for item in items), True)
