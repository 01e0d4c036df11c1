"""Options of other programs, and what to use here instead: one TOML file per program in this folder.

``names`` maps an option (``*`` matches anything) to a sentence. A sentence that begins with a flag and a placeholder (``--lr X, in ...``)
is a translation of every value; one that begins with a switch (``--rollout-shuffle``) translates true and drops false; any other sentence
explains why no option corresponds. ``values`` has exceptions: option -> pattern of its value -> replacement, "" to drop it.
``docs/coming-from.md`` is generated from the sentences.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from miles_tools.foreign.not_installed import explain_installation

if TYPE_CHECKING:
    from miles_core.config.schema import Schema

#: Tables of facts that no option sets.
_FACTS = ("gpu", "plugin", "package", "env")
#: Files, in the order of the page.
FILES = ("trl", "verl", "prime-rl", "openrlhf", "slime")


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name, about: its name, and a short description of its options.
        names: option -> sentence.
        values: option -> pattern of its value -> replacement.
    """

    name: str
    about: str
    names: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]

    def find(self, option: str) -> str | None:
        """Return the key of ``names`` that an option, with or without leading dashes, matches; None if it is not listed."""
        plain = normalize(option)
        exact, patterns = _index(self.name)
        if plain in exact:
            return exact[plain]
        return next((key for pattern, key in patterns if fnmatchcase(plain, pattern)), None)

    def names_exactly(self, option: str) -> bool:
        """Whether an option is listed by its own name, and not only matches a pattern."""
        return normalize(option) in _index(self.name)[0]

    def table(self, key: str) -> Mapping[str, str]:
        """Return the table of values of a key of ``names``."""
        return self.values.get(key, {})


@cache
def programs() -> tuple[Program, ...]:
    """Return all programs."""
    found = []
    for name in FILES:
        table = tomllib.loads(files("miles_tools.foreign").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
        found.append(Program(table["program"], table["about"], table["names"], table.get("values", {})))
    return tuple(found)


@cache
def _index(name: str) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    program = next(p for p in programs() if p.name == name)
    exact = {normalize(key): key for key in program.names if "*" not in key}
    return exact, tuple((_escape(normalize(key)), key) for key in program.names if "*" in key)


def _escape(pattern: str) -> str:
    return pattern.replace("[", "[[]")


def normalize(option: str) -> str:
    """Return an option without leading dashes and pluses, with dashes for underscores, in lower case."""
    return option.lstrip("-+").replace("_", "-").lower()


def recognize(options: Iterable[str]) -> Program | None:
    """Return the program that most of ``options`` belong to; None if no program has any of them. Names count more than patterns."""
    given = list(options)

    def count(program: Program) -> tuple[int, int]:
        return sum(map(program.names_exactly, given)), sum(program.find(option) is not None for option in given)

    best = max(programs(), key=count)
    return best if any(count(best)) else None


def is_written_for(program: Program, options: Iterable[str]) -> bool:
    """Whether a file with these entries is one of a program: it has nearly all of them, and at least three by their names."""
    given = list(options)
    matched = sum(program.find(option) is not None for option in given)
    return sum(map(program.names_exactly, given)) >= 3 and matched >= 0.8 * len(given)


def explain(option: str, schema: Schema | None = None) -> str:
    """Return an error message for an option of another program, or for a path or fact in place of a flag; empty if it is none of these."""
    if schema is not None and (said := _explain_path(option.lstrip("-"), schema)):
        return f"{option}: {said}"
    if schema is not None and (said := explain_installation(option, schema)):
        return said
    for program in sorted(
        programs(), key=lambda each: not each.names_exactly(option)
    ):  # names count more than patterns
        if (key := program.find(option)) is not None:
            return f"{option}, an option of {program.name}; here: {program.names[key]}"
    return ""


def _explain_path(name: str, schema: Schema) -> str:
    """Return what to type for a name with dots: the path of an option, or a fact; empty for other names."""
    option = schema.find(name.replace("-", "_")) if "." in name else None
    if option is not None:
        return f"this option is typed {option.flag}"
    head, dot, _ = name.partition(".")
    if dot and head in _FACTS:
        return f"this is a fact and no option: miles plan --fact {name}=VALUE plans with another value"
    return ""
