"""The usual expert, ``down(silu(gate) * up)``, of small weights as one compiled step each way; the gradients of weights are matrix
products. See ``miles_embedded.model.experts`` for the others."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles_embedded.cpu import operations
from miles_embedded.cpu.linear import LARGEST
from miles_embedded.model.onednn import available


def fits(down: Tensor, *others: Tensor) -> bool:
    """Whether experts with down [experts, dim, inner] are small enough, all three matrices of one together, and in order."""
    if not all(t.is_contiguous() for t in (down, *others)):
        return False
    return 3 * down.shape[1] * down.shape[2] <= LARGEST and _x86() and not available()


def _x86() -> bool:
    """Other processors have libraries that know their matrix units."""
    return platform.machine() in ("x86_64", "AMD64")


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
    routing = operations.route(index, len(down))
    y, _ = operations.experts(hidden.contiguous(), routing.row, routing.ends, gate_up, down, keep=False)
    return operations.gather_sum(y, routing.place, weights.contiguous())


class _Experts(torch.autograd.Function):
    """With h = silu(gate) * up and y = down h, the gradient of a choice's weight, grad . y, is (down^T grad) . h, so y is not kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        routing = operations.route(index, len(down))
        hidden, weights = hidden.contiguous(), weights.contiguous()
        y, product = operations.experts(hidden, routing.row, routing.ends, gate_up, down, keep=True)
        ctx.routing = routing
        ctx.save_for_backward(hidden, weights, gate_up, down, product)
        return operations.gather_sum(y, routing.place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, gate_up, down, product = ctx.saved_tensors
        routing, needs, grad = ctx.routing, ctx.needs_input_grad, grads[0].contiguous()
        scale = weights.view(-1).index_select(0, routing.order)
        scaled, grad_product, grad_scale, grad_x = operations.experts_backward(
            grad, routing.row, routing.ends, gate_up, down, product, scale
        )
        return (
            operations.gather_sum(grad_x, routing.place) if needs[0] else None,
            None,
            grad_scale[routing.place] if needs[2] else None,
            _outer(grad_product, hidden.index_select(0, routing.row), routing.counts, gate_up) if needs[3] else None,
            _outer(grad.index_select(0, routing.row), scaled, routing.counts, down) if needs[4] else None,
        )


def _outer(a: Tensor, b: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """[experts, m, n]: of each expert's places the product a^T b, a [places, m] and b [places, n]."""
    out, sizes = torch.empty_like(like), counts.tolist()
    for total, left, right in zip(out.unbind(0), a.split(sizes), b.split(sizes), strict=True):
        torch.mm(left.t(), right, out=total)
    return out
