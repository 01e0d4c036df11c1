"""Mixture-of-experts products on tensors: rows sorted by expert, a matrix product per expert, no padding.

Plain autograd would record hundreds of small slices, each with a full-size zero gradient to add. The steps (gather, product, weighted
sum) are therefore autograd functions whose backward passes also consist of gathers and products: a row has exactly k positions, so
nothing needs a scatter.

Where the product is a loop over experts anyway, the standard expert, ``down(silu(gate) * up)``, runs all steps before the next expert
starts, so that its few hundred rows stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.gradient_sum import GRADIENT_SUM
from miles_embedded.model.onednn import available, matmul, pad_rows
from miles_embedded.model.sorted_choices import SortedChoices, sort_choices

#: (rows sorted by group [rows, in], matrices [groups, in, out], ``offs``: end of each group's rows) -> [rows, out].
GroupedProduct = Callable[..., Tensor]
#: Attribute of a module whose products read rounded rows (``quantized.activation``); usually absent or None.
INPUT_ROUNDING = "input_rounding"

#: Up to this many (row, expert) pairs, a CPU uses one grouped product for all experts if no gradient is needed.
_FEW = 4096


def swiglu_of_halves(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves of x [..., 2 width] -> [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu_experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Callable[[Tensor], Tensor] = swiglu_of_halves,
    multiply: GroupedProduct | None = None,
) -> Tensor:
    """Compute standard experts with torch: each row's weighted sum of ``down(silu(gate) * up)`` over its experts (Shazeer 2020).

    Args:
        hidden: [rows, dim].
        index: [rows, k] expert indices.
        weights: [rows, k].
        gate_up: [experts, 2 * inner, dim], the gate first.
        down: [experts, dim, inner].
        gate: computes ``swiglu_of_halves`` where one grouped product takes all experts.
        multiply: the grouped product; torch's by default.

    Returns:
        [rows, dim].
    """
    if not uses_grouped_product(hidden, index, down):
        return _SwiGLUExperts.apply(hidden, weights, gate_up, down, sort_choices(index, len(down)))
    choices = sort_choices(index, len(down), counted=False)
    inner = gate(grouped_linear(dispatch(hidden, choices), gate_up, choices, multiply=multiply))
    return combine(grouped_linear(inner, down, choices, multiply=multiply), weights, choices).to(hidden.dtype)


def uses_grouped_product(x: Tensor, index: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies the rows of all experts in one grouped product instead of a product per expert.

    Args:
        x: [rows, dim].
        index: [rows, k] expert indices.
        weight: [experts, n, m], one of the experts' weights.
    """
    if x.is_cuda:
        return gpu_has_grouped(x, weight)
    return _cpu_has_grouped() and x.device.type == "cpu" and _is_few(x, index, weight)


def dispatch(hidden: Tensor, choices: SortedChoices) -> Tensor:
    """Gather rows in sorted order: [rows, hidden] -> [rows * k, hidden]."""
    if not torch.is_grad_enabled():
        return hidden.index_select(0, choices.row)
    return _Dispatch.apply(hidden, choices.row, choices.place)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    choices: SortedChoices,
    bias: Tensor | None = None,
    transposed: bool = False,
    multiply: GroupedProduct | None = None,
) -> Tensor:
    """Multiply each expert's sorted rows by its matrix.

    Args:
        x: [rows * k, in], sorted by expert.
        weight: [experts, out, in], or [experts, in, out] if ``transposed``.
        choices: the assignment; without ``counts``, a grouped product is used.
        bias: [experts, out].
        transposed: layout of ``weight``.
        multiply: the grouped product; torch's by default.

    Returns:
        [rows * k, out].
    """
    matrix = weight if transposed else weight.transpose(1, 2)
    if choices.counts is not None:
        out = _GroupedProduct.apply(x, matrix, choices.counts)
    elif multiply is not None:
        out = multiply(x, matrix, offs=choices.ends)
    else:
        out = _multiply_all(x, weight, choices.ends, transposed)
    if bias is None:
        return out
    expert = torch.searchsorted(choices.ends, torch.arange(len(x), device=x.device, dtype=torch.int32), right=True)
    return out + bias.index_select(0, expert)


def _multiply_all(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Multiply the rows of all experts in one grouped product of torch, with a kernel for the gradients of ``weight`` where there is one."""
    if torch.is_grad_enabled() and weight.requires_grad and kernels_run(x.device):
        from miles_embedded.kernels.weight_gradients import computes_gradients

        if computes_gradients(x.device):
            out: Tensor = _OneProduct.apply(x, weight, ends, transposed)
            return out
    return torch.nn.functional.grouped_mm(x, weight if transposed else weight.transpose(1, 2), offs=ends)


def combine(x: Tensor, weights: Tensor, choices: SortedChoices) -> Tensor:
    """Sum the k results of each row, weighted: sorted [rows * k, hidden], weights [rows, k] -> [rows, hidden]."""
    if not torch.is_grad_enabled():
        return _weighted_sum(x, weights, choices.place, choices.order)
    return _Combine.apply(x, weights, choices.row, choices.place, choices.order)


def gpu_has_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether a GPU has a grouped product for these operands: bfloat16, with rows of a multiple of 16 bytes."""
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and hasattr(torch.nn.functional, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
    )


def _is_few(x: Tensor, index: Tensor, weight: Tensor) -> bool:
    """Whether these are the few rows of a decode step, for which a product per expert means hundreds of small operations.

    A grouped product has no advantage where oneDNN is the faster library.
    """
    return (
        x.dtype == weight.dtype == torch.float32
        and index.numel() <= _FEW
        and not torch.is_grad_enabled()
        and not available()
    )


@cache
def _cpu_has_grouped() -> bool:
    """Whether this torch has a float32 grouped product on a CPU."""
    product = getattr(torch.nn.functional, "grouped_mm", None)
    if product is None:
        return False
    try:
        product(torch.ones(2, 8), torch.ones(1, 8, 8), offs=torch.tensor([2], dtype=torch.int32))
    except (RuntimeError, NotImplementedError):
        return False
    return True


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, row: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return hidden.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _gather_sum(grads[0], place), None, None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.counts = counts
        out = x.new_empty(len(x), matrix.shape[2])
        for m, a, b in zip(matrix.unbind(0), x.split(counts), out.split(counts), strict=True):
            torch.mm(a, m, out=b)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        grad_x = grad_matrix = None
        grad = grads[0].contiguous()
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for m, a, b in zip(matrix.unbind(0), grad.split(ctx.counts), grad_x.split(ctx.counts), strict=True):
                torch.mm(a, m.t(), out=b)
        if ctx.needs_input_grad[1]:
            # Use the parameter's layout, so that accumulating the gradient needs no copy.
            grad_matrix = torch.empty_like(matrix)
            rows = zip(grad_matrix.unbind(0), x.split(ctx.counts), grad.split(ctx.counts), strict=True)
            for out, a, b in rows:
                if out.is_contiguous():
                    torch.mm(a.t(), b, out=out)
                else:
                    torch.mm(b.t(), a, out=out.t())
        return grad_x, grad_matrix, None


class _OneProduct(torch.autograd.Function):
    """A grouped product of torch. The gradient of ``weight`` is added to its ``GradientSum`` if it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.transposed, ctx.sum = transposed, getattr(weight, GRADIENT_SUM, None)
        return torch.nn.functional.grouped_mm(x, weight if transposed else weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from miles_embedded.kernels.weight_gradients import weight_gradients

        (x, weight, ends), grad, grad_x = ctx.saved_tensors, grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            matrix = weight.transpose(1, 2) if ctx.transposed else weight
            grad_x = torch.nn.functional.grouped_mm(grad, matrix, offs=ends)
        left, right = (x, grad) if ctx.transposed else (grad, x)
        if ctx.sum is None:
            return grad_x, weight_gradients(left, right, ends), None, None
        total, add = ctx.sum.take(x.device)
        weight_gradients(left, right, ends, total, add)
        return grad_x, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, row: Tensor, place: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, row, place, order)
        return _weighted_sum(x, weights, place, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, row, place, order = ctx.saved_tensors
        if kernels_run(x.device):
            from miles_embedded.kernels.experts import weighted_sum_gradients

            return *weighted_sum_gradients(grads[0], x, weights, order), None, None, None
        grad = grads[0].index_select(0, row)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = (grad * x).sum(-1, dtype=weights.dtype).index_select(0, place.view(-1)).view_as(weights)
        weight = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        return (grad * weight).to(x.dtype), grad_weights, None, None, None


class _SwiGLUExperts(torch.autograd.Function):
    """All steps of the standard expert, expert by expert.

    Only the gate and up products are saved for the backward pass. With h = silu(gate) * up and y = down h, the gradient of a row's
    weight, grad . y, equals (down^T grad) . h, so y is not needed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, choices: SortedChoices
    ) -> Tensor:
        ctx.choices = choices
        weight = weights.reshape(-1).index_select(0, choices.order).unsqueeze(1)
        products, outputs = [], []
        for expert, piece in _pieces(choices):
            product = matmul(hidden.index_select(0, _padded_rows(choices, piece)), gate_up[expert].t())
            gate, up = product.chunk(2, 1)
            products.append(product)
            output = matmul(silu(gate).mul_(up), down[expert].t())[: piece.stop - piece.start]
            outputs.append(output.mul_(weight[piece]))
        ctx.save_for_backward(hidden, weight, gate_up, down, *products)
        return _gather_sum(torch.cat(outputs), choices.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, gate_up, down, *products = ctx.saved_tensors
        choices, needs = ctx.choices, ctx.needs_input_grad
        grad_x = []
        grad_weight = torch.empty_like(weight)
        grad_gate_up = torch.zeros_like(gate_up) if needs[2] else None
        grad_down = torch.zeros_like(down) if needs[3] else None
        for (expert, piece), product in zip(_pieces(choices), products, strict=True):
            count, rows = piece.stop - piece.start, _padded_rows(choices, piece)
            # Padding rows have weight 0, so their gradients are 0 too.
            scale = pad(weight[piece], (0, 0, 0, len(rows) - count))
            grad = grads[0].index_select(0, rows)
            gate, up = product.chunk(2, 1)
            active = silu(gate)
            h = active * up
            grad_h = matmul(grad, down[expert])
            torch.sum((grad_h * h)[:count], 1, keepdim=True, dtype=weight.dtype, out=grad_weight[piece])
            if grad_down is not None:
                grad_down[expert] = matmul(grad.t(), h.mul_(scale))
            grad_h.mul_(scale)
            grad_product = torch.empty_like(product)
            grad_gate, grad_up = grad_product.chunk(2, 1)
            torch.mul(grad_h, active, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_h.mul_(up), gate, grad_input=grad_gate)
            if grad_gate_up is not None:
                grad_gate_up[expert] = matmul(grad_product.t(), hidden.index_select(0, rows))
            if needs[0]:
                grad_x.append(matmul(grad_product, gate_up[expert])[:count])
        return (
            _gather_sum(torch.cat(grad_x), choices.place) if needs[0] else None,
            grad_weight[choices.place].squeeze(-1) if needs[1] else None,
            grad_gate_up,
            grad_down,
            None,
        )


def _padded_rows(choices: SortedChoices, piece: slice) -> Tensor:
    """Return the rows of a piece, padded with row 0 to the size that ``pad_rows`` returns."""
    count = piece.stop - piece.start
    return pad(choices.row[piece], (0, pad_rows(count) - count))


def _pieces(choices: SortedChoices) -> list[tuple[int, slice]]:
    """Return (expert, sorted positions) of every expert with rows."""
    found, start = [], 0
    for expert, count in enumerate(choices.counts or ()):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


def _weighted_sum(x: Tensor, weights: Tensor, place: Tensor, order: Tensor) -> Tensor:
    """Sum the k positions of each row, weighted: sorted [rows * k, hidden], weights [rows, k] -> [rows, hidden]."""
    if kernels_run(x.device):
        from miles_embedded.kernels.experts import weighted_sum

        return weighted_sum(x, weights, place)
    weighted = (x * weights.reshape(-1).index_select(0, order).unsqueeze(1)).to(x.dtype)
    return _gather_sum(weighted, place)


def _gather_sum(x: Tensor, place: Tensor) -> Tensor:
    """Sum the k positions of each row: sorted [rows * k, hidden] -> [rows, hidden]."""
    if kernels_run(x.device):
        from miles_embedded.kernels.experts import sum_choices

        return sum_choices(x, place)
    first, *others = place.unbind(1)
    total = x.index_select(0, first)
    for choice in others:
        total += x.index_select(0, choice)
    return total
