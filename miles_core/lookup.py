"""Public names, looked up when they are first used.

So importing a module that only names them does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def looked_up(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module whose names are defined in others.

    Args:
        module: its name.
        homes: module that defines names -> the names, with spaces between them.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"{module} has no {name!r}")
        return getattr(import_module(home_of[name]), name)

    return find, lambda: sorted(home_of)
