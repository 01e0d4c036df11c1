"""Emulated linear layers whose gradients are quantised, too (``--quantized-dgrad``).

gradient of the input:  dequantise(quantise(gradient of the output)) @ dequantise(quantise(weight))
gradient of the weight: (gradient of the output)^T @ dequantise(quantise(input)), as without the option

A gradient that the format cannot store, such as the single column of a value head in blocks of 32, is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.quantized.rounding import Rounding


class EmulatedLinear:
    """Forward of a linear layer that rounds the gradient of its output for the gradient of its input. It replaces the instance's
    ``forward``; the input is already rounded."""

    def __init__(self, inputs: Rounding, module: nn.Linear) -> None:
        self.inputs, self.module = inputs, module
        self._own = module.forward
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        if not self.inputs.enabled or not torch.is_grad_enabled():
            return self._own(x)
        return multiply(x, self.module.weight, self.module.bias, self.inputs.round)

    def remove(self) -> None:
        """Restore the layer's own forward."""
        if self._before is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._before


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, round: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply x [..., K] by a weight [N, K]; ``round`` rounds the gradient [..., N] for the gradient of x."""
    y: Tensor = _RoundedGradient.apply(x, weight, bias, round)
    return y


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, round: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.round = round
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needs = gradient[0].reshape(-1, len(weight)), ctx.needs_input_grad
        return (
            (ctx.round(grad) @ weight).view(x.shape) if needs[0] else None,
            grad.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None,
            grad.sum(0) if needs[2] else None,
            None,
        )
