"""Compute a forward pass in a wider type: a 16-bit model in float32, a float32 model in float64.

The values of the weights do not change. Each module computes with wide copies of its own parameters while it runs, which hide the
parameters as ``quantized.weights`` does, so that a wide copy of the whole model never exists. Tables of embeddings are not copied: their
rows are widened. Steps that a model always computes in float32 (softmax of a router, norms) stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Type of a model -> wider type.
_WIDER = {torch.float32: torch.float64, torch.float64: torch.float64}


@contextmanager
def wider_arithmetic(model: nn.Module) -> Iterator[None]:
    """Make forwards of ``model`` without gradient compute in the wider type inside this context."""
    hooks = _Wide(_WIDER.get(next(model.parameters()).dtype, torch.float32))
    handles = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(hooks.widen_output))
        elif module._parameters:
            handles.append(module.register_forward_pre_hook(hooks.enter))
            handles.append(module.register_forward_hook(hooks.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
                before[name] = module.__dict__.get(name)
                module.__dict__[name] = value.detach().to(self.wide)
        return tuple(x.to(self.wide) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Show them again. Hooks that ran earlier have already removed what they had put there."""
        for name, value in self._hidden.pop(module, {}).items():
            if module.__dict__.pop(name, None) is not None and value is not None:
                module.__dict__[name] = value

    def widen_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Widen the rows of an embedding."""
        return output.to(self.wide)
