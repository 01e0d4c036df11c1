"""Linear layers of small weights whose products are compiled; the gradient of the weight stays with PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles_core.observe.environment import cpu_info
from miles_embedded.cpu import operations
from miles_embedded.model.onednn import available

#: Numbers of a weight at most, so that it stays in a core's cache (a megabyte), and rows at least, to pay for arranging it
#: (benchmarks/cpu_kernels.py).
LARGEST, ROWS = 1 << 18, 1024


@cache
def pays() -> bool:
    """Whether linear layers are computed here: on processors of AMD, where MKL takes a slower path than on Intel's, but not on those
    where oneDNN is the faster library anyway."""
    return "AuthenticAMD" in cpu_info() and not available()


class Linear(nn.Linear):
    """``nn.Linear`` whose products, forward and backward, are compiled where that pays."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = input.numel() // max(input.shape[-1], 1)
        if rows < ROWS or self.weight.numel() > LARGEST or not _fits(input, self.weight):
            return super().forward(input)
        if torch.is_grad_enabled():
            out = _Linear.apply(input, self.weight)
        else:
            out = operations.linear(input.contiguous(), self.weight, True)
        return out if self.bias is None else out + self.bias


def _fits(x: Tensor, weight: Tensor) -> bool:
    return weight.is_contiguous() and operations.fits(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return operations.linear(x, weight, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needs = grads[0].contiguous(), ctx.needs_input_grad
        rows = grad.view(-1, grad.shape[-1])
        return (
            operations.linear(grad, weight, False) if needs[0] else None,
            torch.mm(rows.t(), x.view(-1, x.shape[-1])) if needs[1] else None,
        )
