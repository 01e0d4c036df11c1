"""Correct command lines: translate flags of other programs, and enable the plugins that flags need.

Translations are in ``miles_core/config/elsewhere.toml`` and in manifests (``Plugin.elsewhere``).

A table maps patterns of a flag's value to the replacement of flag and value. In a replacement, ``{}`` is the value, ``{0}`` and ``{1}``
are its words, and ``{list}`` joins the words with commas. An empty pattern matches a switch without a value, ``**`` matches any number
of words, and an empty replacement drops the flag.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from miles_core.config import elsewhere
from miles_core.config.schema import Schema

Table = Mapping[str, str]
#: The pattern that matches any number of words.
ANYTHING = "**"
_PLACE = re.compile(r"\{(list|\d*)\}")


def correct(
    argv: Sequence[str],
    schema: Schema,
    problems: Sequence[str],
    attempt: Callable[[Sequence[str]], tuple[list[str], dict[str, str]]],
) -> str:
    """Return the error message for a command line that a translation and missing plugins correct; "" if they solve too little.

    The message shows the corrected command line and only the remaining problems.

    Args:
        argv: the command line.
        schema: all options.
        problems: problems of ``argv``.
        attempt: loads a command line; returns its problems, and the flags that would enable missing plugins, flag -> value.
    """
    line, changed = translate(argv, schema)
    rest = list(problems)
    for _ in range(2):  # first enable the plugins of the given flags, then those of translated flags
        rest, missing = attempt(line)
        if not rest:
            break
        line = _enable_plugins(line, missing)
    if len(problems) < 2 or len(rest) >= len(problems):
        return ""
    dropped = [flag for flag, (_, here) in changed.items() if not here]
    listed = [f"  {typed} -> {here}" for typed, here in changed.values() if here]
    listed += [f"  without meaning here: {', '.join(dropped)}"] if dropped else []
    listed += [f"  {sentence}" for flag in dropped if (sentence := elsewhere.explain_foreign_option(flag))]
    solved = "all of them" if not rest else f"{len(problems) - len(rest)} of them"
    head = f"{len(problems)} problems in the configuration; the command line below solves {solved}"
    left = "; what is left:\n" + "\n".join(f"  - {problem}" for problem in rest) if rest else ""
    about = "translated:\n" + "\n".join(listed) + "\n\n" if listed else ""
    return f"{head}{left}\n\n{about}with these flags, and all plugins that they need:\n  {shlex.join(line)}"


def _enable_plugins(argv: Sequence[str], missing: Mapping[str, str]) -> list[str]:
    """Add flags that enable plugins to a command line. A new ``--plugins`` value replaces the old one, which it includes."""
    line, missing = list(argv), dict(missing)
    if "--plugins" in line and "--plugins" in missing:
        line[line.index("--plugins") + 1] = missing.pop("--plugins")
    return [*line, *(word for pair in missing.items() for word in pair)]


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
