"""Results of tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.data import valid_text
from miles_core.plugin import DataError


class ToolFault(DataError):
    """A tool could not be called (a lost server, an instance that cannot be created): the sample fails, the run continues."""


@dataclass(frozen=True)
class Outcome:
    """The result of a call for the model. Makes the tool's text valid (``valid_text``).

    Attributes:
        text: the result, or the description of the error.
        failed: whether it is an error.
        parts: the result as content parts in OpenAI's form, if it holds an image.
        broken: the sample cannot go on, because the state of the tool's instance is unknown.
    """

    text: str
    failed: bool = False
    broken: bool = False
    parts: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", valid_text(self.text))

    @classmethod
    def error(cls, text: str) -> Outcome:
        """Make an error for the model."""
        return cls(f"Error: {text}", failed=True)
