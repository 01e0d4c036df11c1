"""A forward of our own for one module, that steps aside when the module's class computes something else.

``on_model`` lets a plugin give a module another class. Python looks a method up on the instance before its class, so a forward that was put
on the instance would hide the plugin's. The forward that is put there compares, at every call, the class's with the one it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let ``forward(module, ...)`` compute ``module``, for as long as its class has the forward that it has now.

    A subclass that keeps the forward (FSDP2's, a parametrization's) changes nothing.
    """
    replaced = type(module).forward

    def choose(module: Any, *args: Any, **kwargs: Any) -> Any:
        current = type(module).forward
        return (forward if current is replaced else current)(module, *args, **kwargs)

    module.__dict__["forward"] = MethodType(choose, module)
