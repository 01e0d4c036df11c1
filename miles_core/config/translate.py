"""Command lines of other programs in the words used here: the tables of ``elsewhere.toml`` and of manifests (``Plugin.elsewhere``).

A table maps what follows a flag, as a pattern, to what stands for both: ``{}`` is the value, ``{0}`` and ``{1}`` its words, ``{list}`` the
words with commas between them. An empty pattern is a switch without a value, ``**`` is any number of words, and an empty replacement
drops the flag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from miles_core.config import elsewhere
from miles_core.config.schema import Schema

Table = Mapping[str, str]
#: The pattern of any number of words.
ANYTHING = "**"
_PLACE = re.compile(r"\{(list|\d*)\}")


def tables(schema: Schema) -> dict[str, Table]:
    """Flag -> its table, those of core and of all installed plugins."""
    found: dict[str, Table] = dict(elsewhere.translations())
    for plugin in schema.manifests.values():
        found |= {flag: table for flag, table in plugin.elsewhere.items() if not isinstance(table, str)}
    return found


def translate(argv: Sequence[str], schema: Schema) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """A command line with every flag that has a translation replaced.

    Returns:
        the new command line, and for each flag that was replaced what was typed and what stands for it ("" is nothing).
    """
    known, changed = tables(schema), {}
    result: list[str] = []
    for flag, words in _split(argv):
        replacement = translated(known.get(flag, {}), words)
        if replacement is None:
            result += [flag, *words] if flag else words
        else:
            result += replacement
            changed[flag] = (" ".join([flag, *words]), " ".join(replacement))
    return result, changed


def translated(table: Table, words: Sequence[str]) -> list[str] | None:
    """The words that stand for a flag with these words behind it; None where the table does not say."""
    values = {"": " ".join(words), "list": ",".join(words), **{str(i): word for i, word in enumerate(words)}}
    for pattern, replacement in table.items():
        fits = len(pattern.split()) == len(words) and fnmatchcase(values[""], pattern)
        if fits or pattern == ANYTHING:
            return [_PLACE.sub(lambda place: values[place[1]], word) for word in replacement.split()]
    return None


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags with the words behind them; words before the first flag have the flag ""."""
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        name, equals, value = token.partition("=")
        if token.startswith("--"):
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(token)
        else:
            found.append(("", [token]))
    return found
