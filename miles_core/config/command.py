"""The command that loads a configuration. Besides ``miles train``, other commands accept the options of runs, and have their own, too."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean, find_nearest

#: The line before a corrected command line.
COMPLETE = "the complete command line:"


@dataclass(frozen=True)
class Command:
    """A command, for error messages that show a complete command line.

    Attributes:
        words: the words before the options of runs: the command, and its own options as typed. Empty for a call from Python, which has no
            command line.
        flags: the command's own flags.
        before, after: options of runs that the command itself adds to those of the user; they are not shown.
    """

    words: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


TRAIN = Command(("miles", "train"), ("--help", "--help-all", "--dry-run"))


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's own options. A mistake is a ConfigError with one sentence and a complete corrected line.

    Args:
        name: the command, e.g. ``"plugins new"``.
        options: further arguments of ``ArgumentParser``.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(prog=f"miles {name}", allow_abbrev=False, exit_on_error=False, **options)
        self.name = name

    def error(self, message: str) -> NoReturn:
        """See ``ArgumentParser.error``; raises instead of exiting."""
        raise argparse.ArgumentError(None, message)

    def parse_own(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Command]:
        """Parse the options of a command that also accepts options of runs.

        Args:
            argv: its arguments, including options of runs.

        Returns:
            the values of its own options, the remaining words, and the command for ``load``.

        Raises:
            ConfigError: a value is invalid or missing.
        """
        options, rest = self._parse(argv, more=True)
        typed = set(_positions(argv, rest))
        own = [word for position, word in enumerate(argv) if position not in typed]
        return options, rest, Command(("miles", *self.name.split(), *own), tuple(self._flags()))

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the options of a command that has no others.

        Raises:
            ConfigError: a flag is unknown, or a value is invalid or missing.
        """
        return self._parse(argv, more=False)[0]

    def refuse(self, problem: str, line: Sequence[str]) -> ConfigError:
        """Return the error for a problem. line: the arguments of the corrected command line."""
        return ConfigError(f"{problem}\n\n{COMPLETE}\n  {shlex.join(['miles', *self.name.split(), *line])}")

    def refuse_value(self, problem: str, argv: Sequence[str], value: str, known: Sequence[str]) -> ConfigError:
        """Return the error for a value that is none of the ``known`` ones, with a corrected line if one of them is similar."""
        near = find_nearest(value, known)
        words = [re.sub(f"(^|=){re.escape(value)}$", rf"\g<1>{near[0]}", word) if near else word for word in argv]
        return self.refuse(problem, words) if near else ConfigError(problem)

    def refuse_word(self, argv: Sequence[str], known: Sequence[str]) -> ConfigError:
        """Return the error for arguments whose first word is none of the ``known`` ones."""
        near = find_nearest(argv[0], known)
        hint = f"did you mean {near[0]}?" if near else f"it is {' or '.join(known)}"
        return self.refuse(f"unexpected argument {argv[0]!r}; {hint}", [*near[:1], *argv[1:]])

    def _parse(self, argv: Sequence[str], more: bool) -> tuple[argparse.Namespace, list[str]]:
        problems, line = [], list(argv)
        for _ in range(10):  # correct one mistake after another, to show a line without any
            try:
                options, rest = self.parse_known_args(line)
            except argparse.ArgumentError as error:
                problem, line = self._correct(error, line)
            else:
                if not rest or more:
                    break
                problem, line = self._correct_unknown(rest, line)
            problems.append(problem)
            if "--help" in line:
                break
        if not problems:
            return options, rest
        head = (
            problems[0]
            if len(problems) == 1
            else "\n".join([f"{len(problems)} problems:", *(f"  - {p}" for p in problems)])
        )
        raise self.refuse(head, line)

    def _correct(self, error: argparse.ArgumentError, line: list[str]) -> tuple[str, list[str]]:
        """Return the sentence for a missing or invalid value, and the arguments without this mistake."""
        action = next((each for each in self._actions if _name(each) == error.argument_name), None)
        if action is None:
            return self._add_missing(line, error.message.rpartition(": ")[2].split(", "))
        message, flag = error.message, error.argument_name or ""
        choices, typed = [str(choice) for choice in action.choices or ()], re.search(r"'(.*?)'", message)
        value = typed[1] if typed else ""
        if message.startswith("ignored explicit argument"):
            flag = next(flag for flag in action.option_strings if f"{flag}={value}" in line)
            return f"{flag} takes no value", [flag if word == f"{flag}={value}" else word for word in line]
        if message.startswith("expected"):
            flag = next(word for word in reversed(line) if word in action.option_strings)
            at = len(line) - line[::-1].index(flag)
            return f"{flag} needs a value: {action.help}", [*line[:at], _placeholder(action), *line[at:]]
        if choices:
            head = f"{flag} cannot be {value!r}; it is {' or '.join(choices)}{did_you_mean(value, choices, '; ')}"
            better = (find_nearest(value, choices) or [_placeholder(action)])[0]
        else:
            kind = {int: "a whole number", float: "a number"}.get(action.type)  # type: ignore[call-overload]
            head = f"{flag} {value}: it must be {kind}" if kind else f"{flag}: {message}"
            better = _placeholder(action)
        return head, _replace(line, action.option_strings, value, better)

    def _add_missing(self, line: list[str], names: Sequence[str]) -> tuple[str, list[str]]:
        """Return the sentence for required arguments that are missing, and the arguments with them."""
        missing = [action for action in self._actions if _name(action) in names]
        needs = [[*action.option_strings[:1], _placeholder(action)] for action in missing]
        described = [f"{' '.join(words)} ({action.help})" for words, action in zip(needs, missing, strict=True)]
        first = [word for words in needs for word in words if len(words) == 1]
        last = [word for words in needs for word in words if len(words) > 1]
        positional = [action for action in self._actions if not action.option_strings]
        given = any(action not in missing for action in positional)  # the missing ones come after these
        words = [*line, *first, *last] if given else [*first, *line, *last]
        return f"{self.prog} needs {' and '.join(described)}", words

    def _correct_unknown(self, rest: Sequence[str], line: list[str]) -> tuple[str, list[str]]:
        """Return the sentence for words that no option takes, and the arguments without these mistakes."""
        unknown, better, sentences, corrected = set(_positions(line, rest)), [], [], False
        names = [flag.lstrip("-") for flag in self._flags()]
        for position, word in enumerate(line):
            if position not in unknown:
                better.append(word)
            elif word.startswith("-"):
                flag, equals, value = word.partition("=")
                near = [f"--{name}" for name in find_nearest(flag.lstrip("-"), names)]
                corrected = bool(near)
                better += [f"{near[0]}{equals}{value}"] if near else []
                hint = f"did you mean {' or '.join(near)}?" if near else f"{self.prog} --help lists its flags"
                sentences.append(f"unknown flag {flag}; {hint}")
            elif corrected:  # the value of a corrected flag
                better.append(word)
            elif not sentences:
                sentences.append(f"unexpected argument {word!r}")
        return "; ".join(sentences), better

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]


def _positions(line: Sequence[str], rest: Sequence[str]) -> list[int]:
    """Return where the words ``rest``, which are in their order, are in ``line``."""
    found: list[int] = []
    for position, word in enumerate(line):
        if len(found) < len(rest) and word == rest[len(found)]:
            found.append(position)
    return found


def _name(action: argparse.Action) -> str:
    """Return the name of an option in argparse's errors."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _placeholder(action: argparse.Action) -> str:
    """Return a value that an option takes, else the placeholder of its help."""
    if action.default not in (None, "", []) and not isinstance(action.default, list):
        return str(action.default)
    choices = [str(choice) for choice in action.choices or ()]
    number = ["1"] if action.type in (int, float) else []
    return [*choices, *number, str(action.metavar or action.dest.upper())][0]


def _replace(line: Sequence[str], flags: Sequence[str], value: str, better: str) -> list[str]:
    """Replace the value of an option, or of an argument without flag."""
    found, done = [*line], False
    for position, word in enumerate(line):
        before = line[position - 1] if position else ""
        if not done and flags and any(word == f"{flag}={value}" for flag in flags):
            found[position], done = f"{word.partition('=')[0]}={better}", True
        elif not done and word == value and (before in flags or not flags):
            found[position], done = better, True
    return found
