"""Products and sums on a GPU whose order of additions is fixed, in Triton.

A program computes one tile of a product and adds the terms of the inner dimension in order, 64 at a time; the inner dimension is never divided
among programs, as cuBLAS does for few rows. Tiles have at least 64 rows, so every tile uses the same matrix instruction (on Hopper ``wgmma``
with 64 rows and 16 inner entries) and an entry of the result depends on its row and its column only. The number of rows and columns of a tile
may change with the shape of the product: ``products.check_tiles`` compares the tiles on the machine that runs them.

A sum over the last dimension has one program per row, whereas PyTorch divides rows among threads, warps and blocks by their number. FP32
products use FP32 arithmetic, not TF32. Gradients are PyTorch's own products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Rows and columns of a program's tile, its warps, and its pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


#: Inner entries that a tile adds at a time, and entries of a row that a sum reads at once.
_INNER, _ENTRIES = 64, 1024
#: Tiles for few rows, some rows and many rows.
FEW, SOME, MANY = Tile(64, 32, 4, 5), Tile(64, 128, 4, 4), Tile(128, 256, 8, 3)
#: The tile of FP32 products, and its inner entries.
_WIDE, _WIDE_INNER = Tile(64, 64, 4, 2), 32
#: Rows up to which ``FEW`` and ``SOME`` are used.
_FEWEST, _FEWER = 64, 512
#: Row tiles whose programs run one after the other over the same columns.
_BAND = 8


# fmt: off
@triton.jit
def _find_group(ends, tile, groups, ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the group of a row tile, and its first row and the end of the group; group ``groups`` for a tile after the last."""
    group = tl.arange(0, BLOCK_GROUPS)
    end = tl.load(ends + group, mask=group < groups, other=0)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0)
    count = tl.where(group < groups, (end - start + ROWS - 1) // ROWS, 0)
    found = tl.sum(((tl.cumsum(count, 0) <= tile) & (group < groups)).to(tl.int32), 0)
    before = tl.sum(tl.where(group < found, count, 0), 0)
    first = tl.sum(tl.where(group == found, start, 0), 0) + (tile - before) * ROWS
    return found, first, tl.sum(tl.where(group == found, end, 0), 0)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    a, b, out, ends, rows, columns, inner, groups, a_batch, a_row, a_inner, b_batch, b_inner, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BAND: tl.constexpr,
    GROUPED: tl.constexpr, BLOCK_GROUPS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):
    across, program = tl.cdiv(columns, COLUMNS), tl.program_id(0)
    if GROUPED:
        batch, first, last = _find_group(ends, program // across, groups, ROWS, BLOCK_GROUPS)
        if batch >= groups:
            return
        batch, first_column = batch.to(tl.int64), (program % across) * COLUMNS
        left_batch = batch * 0
    else:
        batch = tl.program_id(1).to(tl.int64)
        left_batch, last = batch, rows
        band = program // (BAND * across) * BAND
        height = tl.minimum(tl.cdiv(rows, ROWS) - band, BAND)
        first = (band + program % (BAND * across) % height) * ROWS
        first_column = program % (BAND * across) // height * COLUMNS
    row, column, entry = first + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    real, known = row < last, column < columns
    left = a + left_batch * a_batch + row.to(tl.int64)[:, None] * a_row + entry[None, :] * a_inner
    right = b + batch * b_batch + column.to(tl.int64)[None, :] * b_column + entry[:, None] * b_inner
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        if WHOLE:
            x = tl.load(left, mask=real[:, None], other=0.0)
            y = tl.load(right, mask=known[None, :], other=0.0)
        else:
            within = start + entry < inner
            x = tl.load(left, mask=real[:, None] & within[None, :], other=0.0)
            y = tl.load(right, mask=within[:, None] & known[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        left += INNER * a_inner
        right += INNER * b_inner
    place = out + left_batch * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & known[None, :])


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


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows by the matrix of their group, without a synchronisation with the device.

    Args:
        x: [rows, inner], sorted by group.
        matrices: [groups, inner, columns] in the same type.
        ends: [groups] int32 end of each group's rows; the last is ``rows``.

    Returns:
        [rows, columns] in that type, added in FP32.
    """
    out: Tensor = _GroupedProduct.apply(x, matrices, ends)
    return out


def sum_last(x: Tensor) -> Tensor:
    """Add the last dimension of x [..., width] in FP32; returns [...] FP32."""
    out: Tensor = _Sum.apply(x)
    return out


def _tile(rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return _WIDE
    return FEW if rows <= _FEWEST else SOME if rows <= _FEWER else MANY


def _launch(a: Tensor, b: Tensor, out: Tensor, ends: Tensor | None) -> None:
    """Compute ``out`` [batch, rows, columns] from a [batch, rows, inner] and b [batch or groups, inner, columns]."""
    batch, rows, inner = a.shape
    groups, _, columns = b.shape
    tile = _tile(rows if ends is None else 2 * rows // groups, a.dtype)
    step = _WIDE_INNER if a.dtype == torch.float32 else _INNER
    down = triton.cdiv(rows, tile.rows) if ends is None else rows // tile.rows + min(rows, groups)
    grid = down * triton.cdiv(columns, tile.columns), batch
    constants = {
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": step, "BAND": _BAND, "WHOLE": inner % step == 0},
        **{"GROUPED": ends is not None, "BLOCK_GROUPS": triton.next_power_of_2(groups), "PRECISION": "ieee"},
        **{"num_warps": tile.warps, "num_stages": tile.stages},
    }
    strides = (*a.stride(), *b.stride())
    _product[grid](a, b, out, a if ends is None else ends, rows, columns, inner, groups, *strides, **constants)


def compute_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute ``product`` without gradients."""
    out = a.new_empty(*a.shape[:2], b.shape[2])
    if out.numel():
        _launch(a, b, out, None)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return compute_product(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return (
            torch.matmul(grads[0], b.transpose(1, 2)) if left else None,
            torch.matmul(a.transpose(1, 2), grads[0]) if right else None,
        )


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrices, ends)
        out = x.new_empty(len(x), matrices.shape[2])
        if out.numel():
            _launch(x[None], matrices, out[None], ends)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, matrices, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        left, right = ctx.needs_input_grad[:2]
        multiply = torch.nn.functional.grouped_mm
        return (
            multiply(grad, matrices.transpose(1, 2), offs=ends) if left else None,
            # in the layout of the parameter, whose transpose ``matrices`` usually is
            multiply(grad.t(), x, offs=ends).transpose(1, 2) if right else None,
            None,
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
