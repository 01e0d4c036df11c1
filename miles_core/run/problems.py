"""Several mistakes of a user, told together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from miles_core.errors import ConfigError, MilesError


class Problems:
    """Collects the sentences of errors, to be raised as one."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._errors: list[MilesError] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """An error of a user inside is kept."""
        try:
            yield
        except MilesError as error:
            self._errors.append(error)
            self.found += [line for line in [str(error)] if line not in self.found]

    def told(self) -> None:
        """Raise what was kept: the error itself where there is one, else a ConfigError with all sentences."""
        if len(self.found) == 1:
            raise self._errors[0]
        if self.found:
            raise ConfigError(
                f"{len(self.found)} problems with the inputs of this run:\n" + "\n".join(f"  - {f}" for f in self.found)
            )
