"""The decorator ``hookimpl``, which marks the implementations of hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
MARK = "miles_hook"  # the attribute of a marked function


def hookimpl(function: F) -> F:
    """Mark a method, or a function of a single-file plugin, as the implementation of the hook that has its name.

    The order of implementations is that of the plugins, which ``before`` and ``after`` of the manifest (``Plugin``) declare.
    """
    setattr(function, MARK, True)
    return function
