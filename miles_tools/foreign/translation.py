"""The result of a translation."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_tools.foreign import Program


@dataclass
class Translation:
    """A translated command line.

    Attributes:
        line: the new command line.
        own: misspelled options of the command itself, corrected.
        changed: (typed, replacement) of each option that is called otherwise here.
        dropped: reason -> options that need no replacement.
        unknown: words and options that nothing is known of, and that are left out.
        notes: what the user has to decide.
        program: the program that the options belong to.
        is_whole: whether this is a command line of that program, and not one of this program with a few of its options.
    """

    line: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    program: Program | None = None
    is_whole: bool = False

    def drop(self, name: str, reason: str) -> None:
        """Omit an option, with the reason."""
        self.dropped.setdefault(reason, []).append(name)
