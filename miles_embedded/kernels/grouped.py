"""Products of experts with few rows (decoding): a program computes some columns of one expert, and reads the weights once. torch's grouped
product is optimised for many rows per expert. Here the rows are gathered and the gate is computed within the product, so one
layer of experts is two products and a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2
from miles_embedded.kernels.overlap import overlap, release, wait

#: Columns and inner entries of a block; warps and pipeline stages of a program.
COLUMNS, INNER, WARPS, STAGES = 64, 64, 4, 3
#: Maximum mean number of rows per expert.
FEW = 96


# fmt: off
@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, weight, row_of, ends, out, width, inner,
    GATED: tl.constexpr, GATHERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    expert, column = tl.program_id(1), tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    known, entry = column < width, tl.arange(0, BLOCK_INNER)
    kind = out.dtype.element_ty
    matrix = weight + expert.to(tl.int64) * (2 * width if GATED else width) * inner
    columns = matrix + column[None, :] * inner + entry[:, None]
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    for start in range(first, last, BLOCK_ROWS):
        place = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        real = place < last
        row = tl.load(row_of + place, mask=real, other=0) if GATHERED else place
        rows = x + row[:, None] * inner + entry[None, :]
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        other = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for at in range(0, inner, BLOCK_INNER):
            within = at + entry < inner
            a = tl.load(rows + at, mask=real[:, None] & within[None, :], other=0.0)
            b = tl.load(columns + at, mask=known[None, :] & within[:, None], other=0.0)
            total = tl.dot(a, b, total)
            if GATED:
                c = tl.load(columns + width * inner + at, mask=known[None, :] & within[:, None], other=0.0)
                other = tl.dot(a, c, other)
        if GATED:
            gate, up = total.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
            total = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
        tl.store(out + place[:, None] * width + column[None, :], total, mask=real[:, None] & known[None, :])
    release(OVERLAP)

# fmt: on


def gated_product(x: Tensor, gate_up: Tensor, row: Tensor, ends: Tensor) -> Tensor:
    """The first half of the usual experts.

    Args:
        x: [rows, dim].
        gate_up: [experts, 2 inner, dim], the gate above, contiguous.
        row: [places] the row of each sorted place.
        ends: [experts] int32 where each expert's places end.

    Returns:
        [places, inner]: ``silu(gate) * up``.
    """
    return _multiply(x.contiguous(), gate_up, row, ends, len(row), gate_up.shape[1] // 2, gated=True)


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert.

    Args:
        x: [places, inner], sorted by expert.
        weight: [experts, dim, inner], contiguous.
        ends: [experts] int32 where each expert's places end.

    Returns:
        [places, dim].
    """
    return _multiply(x, weight, ends, ends, len(x), weight.shape[1], gated=False)


def few(index: Tensor, *weights: Tensor) -> bool:
    """Whether these products are faster than torch's for choices ``index`` [rows, k]."""
    return index.numel() <= FEW * len(weights[0]) and all(weight.is_contiguous() for weight in weights)


def _multiply(x: Tensor, weight: Tensor, row: Tensor, ends: Tensor, places: int, width: int, gated: bool) -> Tensor:
    out = torch.empty(places, width, dtype=x.dtype, device=x.device)
    grid = cdiv(width, COLUMNS), len(weight)
    # twice the average, so that few experts need a second block
    rows = min(64, max(16, next_power_of_2(2 * places // len(weight))))
    blocks = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": COLUMNS, "BLOCK_INNER": INNER, "GATED": gated, "GATHERED": gated}
    options = overlap(x) | {"num_warps": WARPS, "num_stages": STAGES}
    _product[grid](x, weight, row, ends, out, width, x.shape[1], **blocks, **options)
    return out
