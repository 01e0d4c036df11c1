"""Products and sums on a GPU whose order of additions is fixed, in Triton.

Every product uses one tile, whatever its shape: a program computes ``_ROWS`` x ``_COLUMNS`` results and adds ``_INNER`` terms at a time, in
order, with no division of the inner dimension among programs. A result therefore depends on its row of the first operand and its column of the
second only. cuBLAS chooses tiles and divides the inner dimension by the number of rows. A sum over the last dimension has one
program per row, whereas PyTorch divides rows among threads, warps and blocks by their number.

FP32 products use FP32 arithmetic, not TF32. Gradients are PyTorch's own products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The tile of a product, and entries of a row that a sum reads at once.
_ROWS, _COLUMNS, _INNER, _ENTRIES = 64, 64, 32, 1024


# fmt: off
@triton.jit
def _product(  # type: ignore[no-untyped-def]
    a, b, out, rows, columns, inner, a_batch, a_row, a_inner, b_batch, b_inner, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        at = start + tl.arange(0, INNER).to(tl.int64)
        left = tl.load(
            a + batch * a_batch + row[:, None] * a_row + at[None, :] * a_inner,
            mask=(row[:, None] < rows) & (at[None, :] < inner), other=0.0,
        )
        right = tl.load(
            b + batch * b_batch + at[:, None] * b_inner + column[None, :] * b_column,
            mask=(at[:, None] < inner) & (column[None, :] < columns), other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    place = out + batch * rows * columns + row[:, None] * columns + column[None, :]
    tl.store(place, total, mask=(row[:, None] < rows) & (column[None, :] < columns))


@triton.jit
def _sum(x, out, width, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([ENTRIES], tl.float32)
    for start in range(0, width, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        total += tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))

# fmt: on


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [batch, rows, inner] by b [batch, inner, columns], of one type, added in FP32; returns [batch, rows, columns] in that type."""
    out: Tensor = _Product.apply(a, b)
    return out


def sum_last(x: Tensor) -> Tensor:
    """Add the last dimension of x [..., width] in FP32; returns [...] FP32."""
    out: Tensor = _Sum.apply(x)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        batch, rows, inner = a.shape
        columns = b.shape[2]
        out = a.new_empty(batch, rows, columns)
        if not out.numel():
            return out
        grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS), batch)
        tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "INNER": _INNER, "PRECISION": "ieee"}
        _product[grid](a, b, out, rows, columns, inner, *a.stride(), *b.stride(), **tile, num_warps=4, num_stages=3)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return (
            torch.matmul(grads[0], b.transpose(1, 2)) if left else None,
            torch.matmul(a.transpose(1, 2), grads[0]) if right else None,
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        x = x.contiguous()
        out = x.new_empty(x.shape[:-1], dtype=torch.float32)
        if out.numel():
            _sum[(out.numel(),)](x, out, x.shape[-1], ENTRIES=_ENTRIES, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (grads[0].unsqueeze(-1).expand(ctx.shape).to(ctx.dtype),)
