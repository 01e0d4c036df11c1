"""Lazy exports: import public names on first use, so that importing the exporting module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_exports(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module that exports names of other modules.

    Args:
        module: name of the exporting module.
        homes: defining module -> its exported names, separated by spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"{module} has no {name!r}")
        return getattr(import_module(home_of[name]), name)

    return find, lambda: sorted(home_of)
