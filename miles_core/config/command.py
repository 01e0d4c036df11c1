"""The command that loads a configuration. Besides ``miles train``, other commands accept the options of runs, and have their own, too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


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


def parse_own(
    parser: argparse.ArgumentParser, argv: Sequence[str], name: str
) -> tuple[argparse.Namespace, list[str], Command]:
    """Parse the options of a command other than ``miles train``.

    Args:
        parser: its own options.
        argv: its arguments, including options of runs.
        name: its name, e.g. ``"verify"``.

    Returns:
        the values of its own options, the remaining words, and the command for ``load``.
    """
    options, rest = parser.parse_known_args(list(argv))
    own, position = [], 0
    for word in argv:  # ``rest`` has the remaining words in their order
        if position < len(rest) and word == rest[position]:
            position += 1
        else:
            own.append(word)
    flags = (flag for flag in parser._option_string_actions if flag.startswith("--"))
    return options, rest, Command(("miles", *name.split(), *own), tuple(flags))
