"""Typed values that plugins attach to shared objects."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class StashKey(Generic[T]):
    """A key private to the module that creates it, at module level: ``ROUTES = StashKey[dict[int, Tensor]]()``."""


class Stash:
    """A mapping from ``StashKey[T]`` to ``T``."""

    def __init__(self) -> None:
        self._values: dict[StashKey[Any], Any] = {}

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        self._values[key] = value

    def __getitem__(self, key: StashKey[T]) -> T:
        return cast(T, self._values[key])

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: StashKey[T], default: T) -> T:
        """Return the stored value, or ``default`` if there is none."""
        return cast(T, self._values.get(key, default))

    def setdefault(self, key: StashKey[T], default: T) -> T:
        """Return the stored value; store ``default`` first if there is none."""
        return cast(T, self._values.setdefault(key, default))
