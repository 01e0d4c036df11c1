"""Replace the forward of a single module, until the module's class changes its forward.

``on_model`` lets a plugin change the class of a module. An instance attribute ``forward`` would hide the forward of the new class, because
Python looks up instances first. The replacement therefore compares, at every call, the class's current forward with the original one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``forward(module, ...)`` the forward of ``module`` while its class keeps its current forward.

    A subclass that inherits the forward (FSDP2's, a parametrization's) does not disable the replacement.
    """
    replaced = type(module).forward

    def choose(module: Any, *args: Any, **kwargs: Any) -> Any:
        current = type(module).forward
        return (forward if current is replaced else current)(module, *args, **kwargs)

    module.__dict__["forward"] = MethodType(choose, module)
