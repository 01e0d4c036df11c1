"""Correct command lines: translate options of other programs, correct typing errors, and enable the plugins that flags need.

Translations are in ``miles_tools/foreign`` and in manifests (``Plugin.foreign_flags``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from miles_core.config.command import COMPLETE, Command
from miles_core.config.schema import Schema
from miles_tools.foreign import explain
from miles_tools.foreign.translate import translate
from miles_tools.foreign.translation import Translation

__all__ = ["correct", "explain"]

#: Loads a command line; returns its problems, and flags that would enable missing plugins.
Attempt = Callable[[Sequence[str]], tuple[list[str], dict[str, str]]]
#: The problem of a flag without effect.
_IDLE = re.compile(r"(--[\w-]+)\b.*otherwise it has no effect")


def correct(
    argv: Sequence[str],
    schema: Schema,
    problems: Sequence[str],
    attempt: Attempt,
    command: Command,
) -> str:
    """Return the error message for a command line that a translation, a correction or missing plugins improve; "" if nothing does.

    The message shows the complete corrected command line, what changed in it, and the remaining problems.

    Args:
        argv: the command line.
        schema: all options.
        problems: problems of ``argv``.
        attempt: loads a command line; returns its problems, and the flags that would enable missing plugins, flag -> value.
        command: the command of the options.
    """
    found = translate(argv, schema, command.flags)
    line = found.line
    rest = list(problems)
    for _ in range(
        3
    ):  # first enable the plugins of the given flags, then those of translated flags and of their requirements
        rest, missing = attempt(line)
        if not rest or not missing:
            break
        line = _enable_plugins(line, missing)
    else:
        rest, _ = attempt(line)
    line, rest = _drop_without_effect(line, rest, attempt, given=argv)
    if not (line or found.own) or list(line) == list(argv) or (len(rest) >= len(problems) and not found.is_whole):
        return ""
    complete = f"{COMPLETE}\n  {shlex.join([*command.words, *found.own, *line])}"
    if found.is_whole and found.program is not None:
        head = f"these are options of {found.program.name}; the command line below has those that correspond to them"
    elif len(problems) == 1:
        return f"{problems[0]}\n\n{complete}"
    else:
        solved = "all of them" if not rest else f"{len(problems) - len(rest)} of them"
        head = f"{len(problems)} problems in the configuration; the command line below solves {solved}"
    left = "; what is left:\n" + "\n".join(f"  - {problem}" for problem in rest) if rest else ""
    return f"{head}{left}\n\n{_list_changes(found)}{complete}"


def _drop_without_effect(
    line: list[str], problems: list[str], attempt: Attempt, given: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Drop translated flags that have no effect with the others, such as the name of a record that is not kept."""
    idle = {match[1] for problem in problems if (match := _IDLE.match(problem))} - {*given}
    if not idle:
        return line, problems
    kept: list[str] = []
    dropping = False
    for word in line:
        if word.startswith("--"):
            dropping = word in idle
        if not dropping:  # the values of a dropped flag follow it
            kept.append(word)
    return kept, attempt(kept)[0]


def _list_changes(found: Translation) -> str:
    """List what was translated, what is not needed, what is unknown, and what the user has to decide."""
    sections = {
        f"translated{f' from {found.program.name}' if found.program else ''}:": [
            f"{typed} -> {here}" for typed, here in found.changed
        ],
        "not needed here:": [f"{', '.join(names)}: {reason}" for reason, names in found.dropped.items() if reason],
        "not known, and left out:": [" ".join(found.unknown)] if found.unknown else [],
        "for you to check:": found.notes,
    }
    return "".join(
        f"{title}\n" + "".join(f"  {row}\n" for row in rows) + "\n" for title, rows in sections.items() if rows
    )


def _enable_plugins(argv: Sequence[str], missing: Mapping[str, str]) -> list[str]:
    """Add flags that enable plugins to a command line. A new ``--plugins`` value replaces the old one, which it includes."""
    line, missing = list(argv), dict(missing)
    for flag in [flag for flag in missing if flag in line]:
        line[line.index(flag) + 1] = missing.pop(flag)
    return [*line, *(word for pair in missing.items() for word in pair)]
