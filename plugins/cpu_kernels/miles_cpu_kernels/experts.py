"""The usual expert, ``down(silu(gate) * up)``, of small weights as one compiled step each way; the gradients of weights are matrix
products."""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_cpu_kernels import kernels
from miles_embedded import Experts, available

#: Numbers of an expert's matrices at most, all three together, so that they stay in a core's cache (a megabyte; benchmarks/cpu_kernels.py).
LARGEST = 1 << 18


@cache
def left_to_torch() -> str:
    """Why this processor's experts are torch's; empty where they are compiled."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"libraries know the matrix units of this processor ({platform.machine()})"
    return "oneDNN is the faster library on this processor" if available() else ""


def small_experts(
    before: Experts, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """An ``Experts`` that leaves to ``before`` experts of large weights, and those that are not float32 on a CPU."""
    if kernels.takes(hidden, weights, gate_up, down) and fits(gate_up, down):
        return experts(hidden, index, weights, gate_up, down)
    return before(hidden, index, weights, gate_up, down)


def fits(gate_up: Tensor, down: Tensor) -> bool:
    """Whether experts with down [experts, dim, inner] are small enough, and their numbers in order."""
    return 3 * down.shape[1] * down.shape[2] <= LARGEST and gate_up.is_contiguous() and down.is_contiguous()


def experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each row's experts.

    Args:
        hidden: [rows, dim].
        index: [rows, k] experts.
        weights: [rows, k].
        gate_up: [experts, 2 inner, dim].
        down: [experts, dim, inner].

    Returns:
        [rows, dim].
    """
    index = index.to(torch.int64).contiguous()
    if torch.is_grad_enabled():
        return _Experts.apply(hidden, index, weights, gate_up, down)
    choices = kernels.sort_choices(index, len(down))
    y, _ = kernels.experts(hidden.contiguous(), choices.row, choices.ends, gate_up, down, keep=False)
    return kernels.gather_sum(y, choices.place, weights.contiguous())


class _Experts(torch.autograd.Function):
    """With h = silu(gate) * up and y = down h, the gradient of a choice's weight, grad . y, is (down^T grad) . h, so y is not kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        choices = kernels.sort_choices(index, len(down))
        hidden, weights = hidden.contiguous(), weights.contiguous()
        y, product = kernels.experts(hidden, choices.row, choices.ends, gate_up, down, keep=True)
        ctx.choices = choices
        ctx.save_for_backward(hidden, weights, gate_up, down, product)
        return kernels.gather_sum(y, choices.place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, gate_up, down, product = ctx.saved_tensors
        choices, needs, grad = ctx.choices, ctx.needs_input_grad, grads[0].contiguous()
        scale = weights.view(-1).index_select(0, choices.order)
        scaled, grad_product, grad_scale, grad_x = kernels.experts_backward(
            grad, choices.row, choices.ends, gate_up, down, product, scale
        )
        return (
            kernels.gather_sum(grad_x, choices.place) if needs[0] else None,
            None,
            grad_scale[choices.place] if needs[2] else None,
            _outer(grad_product, hidden.index_select(0, choices.row), choices.counts, gate_up) if needs[3] else None,
            _outer(grad.index_select(0, choices.row), scaled, choices.counts, down) if needs[4] else None,
        )


def _outer(a: Tensor, b: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """[experts, m, n]: of each expert's places the product a^T b, a [places, m] and b [places, n]."""
    out, sizes = torch.empty_like(like), counts.tolist()
    for total, left, right in zip(out.unbind(0), a.split(sizes), b.split(sizes), strict=True):
        torch.mm(left.t(), right, out=total)
    return out
