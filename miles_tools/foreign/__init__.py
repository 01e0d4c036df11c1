"""Options of other programs, and what to use here instead: one TOML file per program in this folder.

``names`` maps an option (``*`` matches anything) to a sentence. A sentence that begins with a flag and a placeholder (``--lr X, in ...``)
is a translation of every value; one that begins with a switch (``--rollout-shuffle``) translates true and drops false; any other one
says why nothing corresponds to the option. ``values`` has exceptions: option -> pattern of its value -> replacement, "" to drop it.
``docs/coming-from.md`` is generated from the sentences.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

#: Files, in the order of the page.
FILES = ("trl", "verl", "prime-rl", "slime")


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
    """Return the program that most of ``options`` belong to; None if no program has any of them."""
    given = list(options)
    counted = [(sum(program.find(option) is not None for option in given), program) for program in programs()]
    most = max(count for count, _ in counted)
    return next((program for count, program in counted if count == most), None) if most else None


def explain(option: str) -> str:
    """Return an error message for an option of another program; empty if no program has it."""
    for program in programs():
        if (key := program.find(option)) is not None:
            return f"{option}, an option of {program.name}; here: {program.names[key]}"
    return ""
