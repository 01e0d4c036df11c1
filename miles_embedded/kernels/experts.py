"""The steps of a mixture-of-experts layer around its products: sorting choices, sums over the choices of a row, and their gradients.

Few rows are multiplied by ``grouped``, more rows by torch's grouped product. Both need only the end of each expert's rows, and no numbers
from the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2
from miles_embedded.kernels.grouped import few, gated_product, product
from miles_embedded.kernels.overlap import overlap, release, wait
from miles_embedded.kernels.swiglu import swiglu_of_halves

#: Most choices that are sorted here: every expert's program reads all of them.
MOST_CHOICES = 1 << 17
_BLOCK = 1024
#: Choices that a program of the sort reads at a time.
_SORTED = 4096


# fmt: off
@triton.jit
def _sort(  # type: ignore[no-untyped-def]
    expert_of, order, place, row_of, ends, choices, K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    expert, column = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, choices, BLOCK):
        chosen = tl.load(expert_of + start + column, mask=start + column < choices, other=1 << 30)
        before += (chosen < expert).to(tl.int32)
    position = tl.sum(before)
    for start in range(0, choices, BLOCK):
        chosen = tl.load(expert_of + start + column, mask=start + column < choices, other=1 << 30)
        mine = chosen == expert
        count = mine.to(tl.int32)
        at = position + tl.cumsum(count) - 1
        tl.store(place + start + column, at.to(tl.int64), mask=mine)
        tl.store(order + at, (start + column).to(tl.int64), mask=mine)
        tl.store(row_of + at, ((start + column) // K).to(tl.int64), mask=mine)
        position += tl.sum(count)
    tl.store(ends + expert, position)


@triton.jit
def _sum_choices(  # type: ignore[no-untyped-def]
    x, weights, place, out, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    kind = x.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(K):
        source = x + tl.load(place + row * K + choice) * width + column
        part = tl.load(source, mask=real, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = (part * tl.load(weights + row * K + choice).to(tl.float32)).to(kind).to(tl.float32)
        total = (total + part).to(kind).to(tl.float32)  # as torch adds them
    tl.store(out + row * width + column, total, mask=real)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    grad, x, weights, order, grad_x, grad_weights, width, K: tl.constexpr, BLOCK: tl.constexpr,
):
    at, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    choice = tl.load(order + at)
    weight = tl.load(weights + choice).to(tl.float32)
    source = grad + choice // K * width
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        real = start + column < width
        given = tl.load(source + start + column, mask=real, other=0.0).to(tl.float32)
        total += given * tl.load(x + at * width + start + column, mask=real, other=0.0).to(tl.float32)
        tl.store(grad_x + at * width + start + column, given * weight, mask=real)
    tl.store(grad_weights + choice, tl.sum(total, 0))

# fmt: on


def sorted_places(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``order``, ``place``, ``row`` and ``ends`` of ``grouped_experts.SortedChoices`` for choices ``index`` [rows, k]."""
    index = index.contiguous()
    order, row = (torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(2))
    place = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    ends = torch.empty(experts, dtype=torch.int32, device=index.device)
    block = min(_SORTED, max(16, next_power_of_2(index.numel())))
    options = {"K": index.shape[1], "BLOCK": block, "num_warps": max(4, block // 512), **overlap(index)}
    _sort[(experts,)](index, order, place, row, ends, index.numel(), **options)
    return order, place, row, ends


def weighted_sum(x: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    """``grouped_experts.combine``: x [rows * k, dim] sorted, weights [rows, k], place [rows, k] -> [rows, dim]."""
    return _sum(x, weights.contiguous(), place)


def sum_choices(x: Tensor, place: Tensor) -> Tensor:
    """The sum of each row's choices: x [rows * k, dim] sorted, place [rows, k] -> [rows, dim]."""
    return _sum(x, None, place)


def _sum(x: Tensor, weights: Tensor | None, place: Tensor) -> Tensor:
    rows, k = place.shape
    x, out = x.contiguous(), x.new_empty(rows, x.shape[1])
    grid = rows, cdiv(x.shape[1], _BLOCK)
    if rows:
        given = x if weights is None else weights
        options = {"K": k, "WEIGHTED": weights is not None, "BLOCK": _BLOCK, **overlap(x)}
        _sum_choices[grid](x, given, place, out, x.shape[1], **options)
    return out


def weighted_sum_gradients(grad: Tensor, x: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``weighted_sum``.

    Args:
        grad: [rows, dim] gradient of the result.
        x: [rows * k, dim] sorted.
        weights: [rows, k].
        order: [rows * k] flat (row, choice) index of each sorted position.

    Returns:
        of ``x`` [rows * k, dim], and of ``weights`` [rows, k].
    """
    grad, x, weights = grad.contiguous(), x.contiguous(), weights.contiguous()
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    if len(x):
        _spread[(len(x),)](grad, x, weights, order, grad_x, grad_weights, x.shape[1], K=weights.shape[1], BLOCK=_BLOCK)
    return grad_x, grad_weights


def fits(hidden: Tensor, index: Tensor) -> bool:
    """Whether ``experts`` takes these."""
    return 0 < index.numel() <= MOST_CHOICES and not torch.is_grad_enabled() and hidden.is_cuda


def experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``grouped_experts.swiglu_experts`` for few rows in bfloat16."""
    _, place, row, ends = sorted_places(index, len(down))
    if few(index, gate_up, down):
        x = product(gated_product(hidden, gate_up, row, ends), down, ends)
    else:
        x = torch.nn.functional.grouped_mm(hidden.index_select(0, row), gate_up.transpose(1, 2), offs=ends)
        x = torch.nn.functional.grouped_mm(swiglu_of_halves(x), down.transpose(1, 2), offs=ends)
    return weighted_sum(x, weights, place)
