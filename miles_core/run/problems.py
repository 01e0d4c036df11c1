"""Collects several user errors to report them together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from miles_core.errors import ConfigError, MilesError


class Problems:
    """Collects errors, to be raised as one.

    Attributes:
        messages: distinct messages of the collected errors.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._errors: list[MilesError] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Catch and collect a ``MilesError`` raised in the body."""
        try:
            yield
        except MilesError as error:
            self._errors.append(error)
            self.messages += [line for line in [str(error)] if line not in self.messages]

    def raise_all(self) -> None:
        """Raise the collected error, or a ConfigError with all messages if there are several; do nothing if there are none."""
        if len(self.messages) == 1:
            raise self._errors[0]
        if self.messages:
            raise ConfigError(
                f"{len(self.messages)} problems with the inputs of this run:\n"
                + "\n".join(f"  - {message}" for message in self.messages)
            )
