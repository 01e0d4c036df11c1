"""Compute a forward pass in a wider type: a 16-bit model in float32, a float32 model in float64.

The values of the weights do not change. Each module computes with wide copies of its own parameters while it runs, which hide the
parameters as ``quantized.weights`` does, so that a wide copy of the whole model never exists. Of the table of an
embedding only the rows that are read are copied. Steps that a model always computes in float32 (softmax of a router, norms) stay in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.errors import MilesError, first_line

#: Type of a model -> wider type.
_WIDER = {torch.float32: torch.float64, torch.float64: torch.float64}
#: Stands for an attribute that a module does not have.
_GONE = object()


@contextmanager
def wider_arithmetic(model: nn.Module) -> Iterator[None]:
    """Make forwards of ``model`` without gradient compute in the wider type inside this context.

    Raises:
        MilesError: a module, for example a plugin's, does not compute in that type, or the memory for its wide parameters is missing.
    """
    hooks = _Wide(_WIDER.get(next(model.parameters()).dtype, torch.float32))
    handles = []
    for module in model.modules():
        if module._parameters:
            enter = hooks.enter_embedding if _reads_ids(module) else hooks.enter
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(hooks.leave, always_call=True))
    try:
        yield
    except RuntimeError as error:
        raise MilesError(f"{type(model).__name__} does not compute in {hooks.wide}: {first_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()


def _reads_ids(module: nn.Module) -> bool:
    """Whether the module is an embedding whose argument is the rows to read. Tables of positions compute the rows from further arguments."""
    return isinstance(module, nn.Embedding) and len(inspect.signature(type(module).forward).parameters) == 2


class _Wide:
    """The hooks of one pass.

    Args:
        wide: type to compute in.
    """

    def __init__(self, wide: torch.dtype) -> None:
        self.wide = wide
        self._hidden: dict[nn.Module, dict[str, Any]] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hide the parameters, or what already hides them (fake-quantised and decoded values), behind wide copies. Inputs are widened
        too, because code in front of a module may convert them to the type of its weight."""
        before: dict[str, Any] = {}
        self._hidden[module] = before
        for name in module._parameters:
            value = getattr(module, name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != self.wide:
                before[name] = module.__dict__.get(name, _GONE)
                module.__dict__[name] = value.detach().to(self.wide)
        return tuple(x.to(self.wide) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def enter_embedding(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hide the table behind a wide copy of the rows that are read."""
        ids, places = args[0].unique(return_inverse=True)
        self._hidden[module] = {name: module.__dict__.get(name, _GONE) for name in ("padding_idx", "weight")}
        module.__dict__.update(padding_idx=None, weight=module.weight.detach()[ids].to(self.wide))
        return places, *args[1:]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Show them again. A hook that ran earlier has already removed what had hidden a parameter before."""
        for name, value in self._hidden.pop(module, {}).items():
            if module.__dict__.pop(name, _GONE) is not _GONE and value is not _GONE:
                module.__dict__[name] = value
