"""Find the first module that computes a value that is not finite.

Checking every tensor of every step would be too slow. A step checks only values to which every NaN or infinity propagates. When that
check fails, the same rows are computed again with hooks on every module: the origin is the first non-finite output in the forward
pass, or else the first non-finite gradient in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


class NonFiniteWatch:
    """Context manager that checks every module's outputs and their gradients.

    Attributes:
        first: description of the first tensor that was not finite; "" if there was none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.first = model, ""
        self._handles: list[Any] = []

    def __enter__(self) -> NonFiniteWatch:
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(self._watch_output(name or type(module).__name__)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_output(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if not self.first and not is_finite(tensor):
                    self.first = f"the output of {name} {_describe(tensor)}{_find_cause(name, module, args)}"
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(self._watch_gradient(name)))

        return hook

    def _watch_gradient(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            if not self.first and not is_finite(gradient):
                self.first = f"the gradient of the output of {name} {_describe(gradient)}"

        return hook


def first_nonfinite(model: nn.Module, body: Callable[[], object]) -> str:
    """Run ``body()`` and describe the first non-finite tensor that ``model`` computes; "" if there is none."""
    with NonFiniteWatch(model) as watch:
        body()
    return watch.first


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    return bool(tensor.detach().isfinite().all())


def _describe(tensor: Tensor) -> str:
    bad = ~tensor.detach().isfinite()
    first = bad.nonzero()[0].tolist()
    value = tensor.detach()[tuple(first)].item()
    return f"{list(tensor.shape)} holds {int(bad.sum())} values that are not finite, the first ({value}) at {first},"


def _find_cause(name: str, module: nn.Module, args: Any) -> str:
    """Describe a cause inside the module itself."""
    for own, parameter in module.named_parameters(recurse=False):
        if not is_finite(parameter):
            return f" because its parameter {name}.{own} is not finite,"
    if all(is_finite(t) for t in _tensors(args)):
        return " from finite inputs,"
    return ""
