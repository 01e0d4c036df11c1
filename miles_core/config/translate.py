"""Translate command lines of other programs with the tables of ``elsewhere.toml`` and of manifests (``Plugin.elsewhere``).

A table maps patterns of a flag's value to the replacement of flag and value. In a replacement, ``{}`` is the value, ``{0}`` and ``{1}``
are its words, and ``{list}`` joins the words with commas. An empty pattern matches a switch without a value, ``**`` matches any number
of words, and an empty replacement drops the flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from miles_core.config import elsewhere
from miles_core.config.schema import Schema

Table = Mapping[str, str]
#: The pattern that matches any number of words.
ANYTHING = "**"
_PLACE = re.compile(r"\{(list|\d*)\}")


def translation_tables(schema: Schema) -> dict[str, Table]:
    """Return flag -> its table, for core and all installed plugins."""
    tables: dict[str, Table] = dict(elsewhere.translations())
    for plugin in schema.manifests.values():
        tables |= {flag: table for flag, table in plugin.elsewhere.items() if not isinstance(table, str)}
    return tables


def translate(argv: Sequence[str], schema: Schema) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Replace every flag that has a translation.

    Returns:
        the new command line, and replaced flag -> (typed text, replacement), where "" means that the flag was dropped.
    """
    tables, changed = translation_tables(schema), {}
    result: list[str] = []
    for flag, words in _split(argv):
        replacement = translate_flag(tables.get(flag, {}), words)
        if replacement is None:
            result += [flag, *words] if flag else words
        else:
            result += replacement
            changed[flag] = (" ".join([flag, *words]), " ".join(replacement))
    return result, changed


def translate_flag(table: Table, words: Sequence[str]) -> list[str] | None:
    """Return the replacement for a flag with the value ``words``; None if no pattern of the table matches."""
    values = {"": " ".join(words), "list": ",".join(words), **{str(i): word for i, word in enumerate(words)}}
    for pattern, replacement in table.items():
        fits = len(pattern.split()) == len(words) and fnmatchcase(values[""], pattern)
        if fits or pattern == ANYTHING:
            return [_PLACE.sub(lambda place: values[place[1]], word) for word in replacement.split()]
    return None


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split a command line into flags and the words after each; words before the first flag have the flag ""."""
    groups: list[tuple[str, list[str]]] = []
    for token in argv:
        name, equals, value = token.partition("=")
        if token.startswith("--"):
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            groups.append(("", [token]))
    return groups
