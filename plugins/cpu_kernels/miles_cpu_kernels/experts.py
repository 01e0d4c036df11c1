"""Small experts, ``down(silu(gate) * up)``, with one kernel for the forward and one for the backward pass.

Weight gradients are computed with torch's matrix products."""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_cpu_kernels import kernels
from miles_embedded import Experts, available

#: Maximum number of elements of an expert's three matrices together: one MB, so that they fit into a core's cache
#: (benchmarks/training/cpu_kernels.py).
LARGEST = 1 << 18


@cache
def left_to_torch() -> str:
    """Return why experts use torch on this processor; empty if they use the kernel."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"torch's libraries use the matrix units of this processor ({platform.machine()})"
    return "oneDNN is faster on this processor" if available() else ""


def small_experts(
    before: Experts, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Compute small float32 experts on a CPU with the kernel, others with ``before``. See ``miles_embedded.Experts``."""
    if kernels.takes(hidden, weights, gate_up, down) and fits(gate_up, down):
        return experts(hidden, index, weights, gate_up, down)
    return before(hidden, index, weights, gate_up, down)


def fits(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernel supports these weights: small enough, and contiguous. down: [experts, dim, inner]."""
    return 3 * down.shape[1] * down.shape[2] <= LARGEST and gate_up.is_contiguous() and down.is_contiguous()


def experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the weighted sum of each row's experts.

    Args:
        hidden: [rows, dim].
        index: [rows, k] expert indices.
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
    """With h = silu(gate) * up and y = down h, a weight's gradient grad . y equals (down^T grad) . h, so y is not saved."""

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
    """Return [experts, m, n]: a^T b over each expert's places, with a [places, m] and b [places, n]."""
    out, sizes = torch.empty_like(like), counts.tolist()
    for total, left, right in zip(out.unbind(0), a.split(sizes), b.split(sizes), strict=True):
        torch.mm(left.t(), right, out=total)
    return out
