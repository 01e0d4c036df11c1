"""Merges attention over a shared prompt with attention over a sample's own tokens, and sums gradients of rows that were read twice
(``trainer.flash``)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2


# fmt: off
@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out, sums, far, far_sums, rows, heads, sums_head, far_sums_head,
    DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):
    place, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_DIM)[None, :]
    row = tl.load(rows + place)
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)
        known = head < heads
        a = tl.load(sums + head * sums_head + row, mask=known, other=0.0)
        b = tl.load(far_sums + head * far_sums_head + place, mask=known, other=0.0)
        top = tl.maximum(a, b)
        both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
        real = known[:, None] & (dim < DIM)
        target = out + (row * heads + head[:, None]) * DIM + dim
        near = tl.load(target, mask=real, other=0.0).to(tl.float32)
        other = tl.load(far + (place * heads + head[:, None]) * DIM + dim, mask=real, other=0.0).to(tl.float32)
        tl.store(target, near * tl.exp(a - both)[:, None] + other * tl.exp(b - both)[:, None], mask=real)
        tl.store(sums + head * sums_head + row, both, mask=known)


@triton.jit
def _add(target, rows, source, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < WIDTH
    at = target + tl.load(rows + place) * WIDTH + column
    total = tl.load(at, mask=known, other=0.0) + tl.load(source + place * WIDTH + column, mask=known, other=0.0)
    tl.store(at, total, mask=known)


@triton.jit
def _sum_copies(x, places, ends, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for copy in range(tl.load(ends + row), tl.load(ends + row + 1)):
        total += tl.load(x + tl.load(places + copy) * WIDTH + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total, mask=known)

# fmt: on


def merge_parts(out: Tensor, sums: Tensor, far: Tensor, far_sums: Tensor, rows: Tensor) -> None:
    """Merge the attention of some rows over other keys into ``out`` and ``sums``, in place.

    Args:
        out: [all rows, heads, dim], contiguous.
        sums: [heads, all rows] float32 log-sum-exp.
        far: [rows, heads, dim], contiguous.
        far_sums: [heads, rows] float32.
        rows: [rows] int64, each at most once.
    """
    heads, dim = out.shape[1:]
    wide = next_power_of_2(dim)
    blocks: dict[str, Any] = {"DIM": dim, "BLOCK_DIM": wide}
    blocks["BLOCK_HEADS"] = min(next_power_of_2(heads), max(1, 4096 // wide))
    if len(rows):
        _merge[(len(rows),)](out, sums, far, far_sums, rows, heads, sums.stride(0), far_sums.stride(0), **blocks)


def add_rows(target: Tensor, rows: Tensor, source: Tensor) -> None:
    """``target[rows] += source`` of contiguous [all rows, ...] and [rows, ...], each row at most once."""
    width = target[0].numel()
    if len(rows):
        _add[(len(rows), cdiv(width, 1024))](target, rows, source, WIDTH=width, BLOCK=1024)


def sum_copies(x: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Sum the copies of each row, in FP32.

    Args:
        x: [copies, ...], contiguous.
        places: [copies] int64, where the copies of each row are, row by row.
        ends: [rows + 1] int32, where those of each row start in ``places``.

    Returns:
        [rows, ...] in the type of ``x``.
    """
    out = torch.empty((len(ends) - 1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = x[0].numel()
    block = min(1024, next_power_of_2(width))
    _sum_copies[(len(out), cdiv(width, block))](
        x, places, ends, out, WIDTH=width, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out
