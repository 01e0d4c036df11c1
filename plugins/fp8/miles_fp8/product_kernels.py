"""Products of FP8 codes for few rows (decoding), and of the experts of a mixture, as Triton kernels.

    y[m, n] = sum over blocks b of 128 along K:  sx[m, b] * sw[n / 128, b] * (codes of x . codes of w in the block)

as ``product`` computes it: tensor cores multiply the codes of a block, and the scaled partial sums are added in FP32. With few rows a product
takes as long as reading the weight, so these kernels read each code once. Without codes of ``x`` they quantise its rows themselves (the rule
of ``kernels``, so the same codes) instead of in a launch of their own.

Hopper's instruction takes at least 64 rows of the left operand and 8 of the right one. With fewer than 64 rows of ``x`` the weight is the left
operand, so that no padding rows are computed. Otherwise the rows are the left one (``ROWS_LEFT``): a thread of that product needs the
scales of
two rows, and a thread of the other one those of a quarter of them, which takes as long as the product.

A long K and a small N would occupy few multiprocessors. Several programs then share the blocks of K, write their partial sums, and the last
one to finish adds them in a fixed order, so that a result never depends on timing.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.overlap import overlap, release, wait
from miles_fp8.kernels import TILE, _quantized

#: Most rows of a product that quantises them inside; with more, quantising them once is faster.
FEW = 16
#: Most rows of a product by these kernels, whatever its size; with more, cuBLAS is faster if the result has more entries than below.
MANY = 64
#: Most blocks of a short K.
SHORT = 16
#: Most entries of a result with more than ``MANY`` rows, for a short and for a long K.
ENTRIES_SHORT, ENTRIES_LONG = 1 << 20, 655_360
#: ``config`` of ``linear`` and ``expert_product`` for products whose order may not depend on the number of rows.
FIXED, FIXED_EXPERTS = (64, 128, 1, 4, 3), (64, 64, 4, 3)
#: Counters of tiles whose partial sums are complete.
TICKETS = 4096
#: Of an H100 (SXM) and an H200.
MULTIPROCESSORS = 132


@triton.jit
def _block_of(matrix, row, known, block, inner, TILE: tl.constexpr):
    """Load block ``block`` of rows [M, 128]; entries outside the matrix are 0."""
    entry = block * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(matrix + row[:, None] * inner + entry, mask=known[:, None] & (entry < inner), other=0.0)


@triton.jit
def _row_scales(x_scales, row, known, block, scale_stride, ROWS_LEFT: tl.constexpr):
    """Load the scales of block ``block`` of rows, [M, 1] or [1, M]; those of rows that are not ``known`` are 0."""
    scale = tl.load(x_scales + block * scale_stride + row, mask=known, other=0.0)
    if ROWS_LEFT:
        return scale[:, None]
    else:
        return scale[None, :]


@triton.jit
def _multiply(rows, weight, ROWS_LEFT: tl.constexpr):
    """The product of codes rows [M, 128] and weight [N, 128]: [M, N], or [N, M]."""
    if ROWS_LEFT:
        return tl.dot(rows, tl.trans(weight))
    else:
        return tl.dot(weight, tl.trans(rows))


@triton.jit
def _zeros(rows: tl.constexpr, columns: tl.constexpr, ROWS_LEFT: tl.constexpr):
    if ROWS_LEFT:
        return tl.zeros([rows, columns], tl.float32)
    else:
        return tl.zeros([columns, rows], tl.float32)


@triton.jit
def _across(of_rows, of_columns, ROWS_LEFT: tl.constexpr):
    """Broadcast values of rows [M] and of columns [N] to the shape of their product."""
    if ROWS_LEFT:
        return of_rows[:, None], of_columns[None, :]
    else:
        return of_rows[None, :], of_columns[:, None]


# fmt: off
@triton.jit
def _scales(
    x_scales, tile_scales, row, known, block, last, scale_stride, FUSED: tl.constexpr, ROWS_LEFT: tl.constexpr,
):
    """Load the scales of the rows and of the weight's tile for block ``block``; 0 from ``last`` on. With FUSED, rows have no scales.

    Triton's pipeline of a loop contains only what ``dot`` reads, so an iteration loads the scales of the next one."""
    tile = tl.load(tile_scales + block, mask=block < last, other=0.0)
    if FUSED:
        return tile, tile
    else:
        return _row_scales(x_scales, row, known & (block < last), block, scale_stride, ROWS_LEFT), tile


@triton.jit
def _store_sum(
    total, out, bias, partial, tickets, row, column, rows, width, BIAS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Store the sums of a tile, with the bias of its columns; if programs share K, the last of them to finish stores the sum of all."""
    place, inside, last = row * width + column, (row < rows) & (column < width), True
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if SPLITS > 1:
        size = rows * width
        tl.store(partial + tl.program_id(2) * size + place, total, mask=inside)
        tl.debug_barrier()  # every thread has stored before the counter shows it
        last = tl.atomic_add(tickets + tile, 1) == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros(total.shape, tl.float32)
            for split in range(SPLITS):
                total += tl.load(partial + split * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
        if BIAS:
            total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _linear(
    x, x_scales, codes, scales, bias, out, partial, tickets, rows, width, inner, scale_stride, x_scale_stride,
    FUSED: tl.constexpr, POWER_OF_TWO: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):
    start = tl.program_id(0) * BLOCK_COLUMNS
    column = start + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known, real = row < rows, column < width
    blocks = tl.cdiv(inner, TILE)
    share = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * share
    last = min(first + share, blocks)
    tile_scales = scales + start // TILE * scale_stride
    ROWS_LEFT: tl.constexpr = BLOCK_ROWS >= 64
    wait(OVERLAP)
    total = _zeros(BLOCK_ROWS, BLOCK_COLUMNS, ROWS_LEFT)
    even_rows, even_tile = _scales(x_scales, tile_scales, row, known, first, last, x_scale_stride, FUSED, ROWS_LEFT)
    odd_rows, odd_tile = _scales(x_scales, tile_scales, row, known, first + 1, last, x_scale_stride, FUSED, ROWS_LEFT)
    for block in range(first, last, 2):  # two blocks at a time wait for memory half as often
        more = block + 1 < last
        even = _block_of(x, row, known, block, inner, TILE)
        odd = _block_of(x, row, known & more, block + 1, inner, TILE)
        even_weight = _block_of(codes, column.to(tl.int64), real, block, inner, TILE)
        odd_weight = _block_of(codes, column.to(tl.int64), real & more, block + 1, inner, TILE)
        if FUSED:
            even, even_scale = _quantized(even.to(tl.float32), POWER_OF_TWO)
            odd, odd_scale = _quantized(odd.to(tl.float32), POWER_OF_TWO)
            if not ROWS_LEFT:
                even_scale, odd_scale = tl.trans(even_scale), tl.trans(odd_scale)
            even_scale, odd_scale = even_scale * even_tile, odd_scale * odd_tile
        else:
            even_scale, odd_scale = even_rows * even_tile, odd_rows * odd_tile
        even_rows, even_tile = _scales(x_scales, tile_scales, row, known, block + 2, last, x_scale_stride, FUSED, ROWS_LEFT)
        odd_rows, odd_tile = _scales(x_scales, tile_scales, row, known, block + 3, last, x_scale_stride, FUSED, ROWS_LEFT)
        total += _multiply(even, even_weight, ROWS_LEFT) * even_scale
        total += _multiply(odd, odd_weight, ROWS_LEFT) * odd_scale
    release(OVERLAP)
    at_row, at_column = _across(row, column, ROWS_LEFT)
    _store_sum(total, out, bias, partial, tickets, at_row, at_column, rows, width, BIAS, SPLITS)


@triton.jit
def _experts(
    x, x_scales, codes, scales, row_of, ends, out, width, inner, x_scale_stride,
    GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    expert, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_COLUMNS
    column = start + tl.arange(0, BLOCK_COLUMNS)
    real = column < width
    kind = out.dtype.element_ty
    ROWS_LEFT: tl.constexpr = BLOCK_ROWS >= 64
    blocks = tl.cdiv(inner, TILE)
    matrix_rows = 2 * width if GATED else width
    matrix = codes + expert * matrix_rows * inner
    tile_scales = scales + (expert * (matrix_rows // TILE) + start // TILE) * blocks
    other_scales = tile_scales + width // TILE * blocks
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    for begin in range(first, last, BLOCK_ROWS):
        place = (begin + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        known = place < last
        row = tl.load(row_of + place, mask=known, other=0) if GATED else place
        total = _zeros(BLOCK_ROWS, BLOCK_COLUMNS, ROWS_LEFT)
        other = total
        tile_scale = tl.load(tile_scales)
        row_scales = _row_scales(x_scales, row, known, 0, x_scale_stride, ROWS_LEFT)
        if GATED:
            other_scale = tl.load(other_scales)
        for block in range(blocks):
            w = _block_of(matrix, column.to(tl.int64), real, block, inner, TILE)
            row_codes = _block_of(x, row, known, block, inner, TILE)
            factor, more = row_scales, block + 1 < blocks
            here, tile_scale = factor * tile_scale, tl.load(tile_scales + block + 1, mask=more, other=0.0)
            row_scales = _row_scales(x_scales, row, known & more, block + 1, x_scale_stride, ROWS_LEFT)
            total += _multiply(row_codes, w, ROWS_LEFT) * here
            if GATED:
                here, other_scale = factor * other_scale, tl.load(other_scales + block + 1, mask=more, other=0.0)
                w = _block_of(matrix + width.to(tl.int64) * inner, column.to(tl.int64), real, block, inner, TILE)
                other += _multiply(row_codes, w, ROWS_LEFT) * here
        if GATED:
            gate, up = total.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
            total = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
        at_row, at_column = _across(place, column, ROWS_LEFT)
        inside = (at_row < last) & (at_column < width)
        tl.store(out + at_row * width + at_column, total.to(kind), mask=inside)
    release(OVERLAP)

# fmt: on


def linear(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tickets: Tensor,
    power_of_two: bool,
    config: tuple[int, int, int, int, int] | None = None,
    rows: int | None = None,
) -> Tensor:
    """Multiply rows by a weight.

    Args:
        x: [M, K] contiguous in bfloat16, or codes E4M3 of it with ``x_scales``.
        x_scales: [M', blocks] with strides (1, M'), as ``kernels.activation_codes``; None quantises ``x`` here.
        codes: [N, K] E4M3, contiguous.
        scales: [ceil(N / 128), at least ceil(K / 128)] FP32, rows contiguous.
        bias: [N] or None.
        tickets: [TICKETS] int32 zeros, which remain zeros. Products that run at the same time need separate ones.
        power_of_two: round the scales of ``x`` up to powers of two.
        config: BLOCK_ROWS, BLOCK_COLUMNS, SPLITS, warps and stages; None chooses.
        rows: M without padding.

    Returns:
        [M, N] bfloat16.
    """
    count, (width, inner) = x.shape[0] if rows is None else rows, codes.shape
    block_rows, block_columns, splits, warps, stages = config or blocks(count, width, inner)
    out = torch.empty(count, width, dtype=torch.bfloat16, device=x.device)
    partial = torch.empty(splits * out.numel(), dtype=torch.float32, device=x.device) if splits > 1 else out
    grid = -(-width // block_columns), -(-count // block_rows), splits
    assert splits == 1 or grid[0] * grid[1] <= TICKETS
    with torch.cuda.device(x.device):
        # fmt: off
        _linear[grid](
            x, x if x_scales is None else x_scales, codes, scales, out if bias is None else bias, out, partial, tickets, count, width, inner,
            scales.stride(0), 0 if x_scales is None else x_scales.stride(1), FUSED=x_scales is None, POWER_OF_TWO=power_of_two,
            BIAS=bias is not None, SPLITS=splits, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, TILE=TILE, num_warps=warps,
            num_stages=stages, **overlap(x),
        )
        # fmt: on
    return out


def takes(rows: int, width: int, inner: int) -> bool:
    """Return whether ``linear`` is faster than cuBLAS, as measured on an H200 (``benchmarks/engine/fp8_product.py --tiles``)."""
    most = ENTRIES_SHORT if inner <= SHORT * TILE else ENTRIES_LONG
    return rows <= MANY or (rows <= 8 * MANY and rows * width <= most)


@lru_cache(4096)
def blocks(rows: int, width: int, inner: int) -> tuple[int, int, int, int, int]:
    """Return BLOCK_ROWS, BLOCK_COLUMNS, SPLITS, warps and stages of ``linear``.

    The rule is a fit to ``benchmarks/engine/fp8_product.py --tiles``. A long K is divided among programs as long as each of them has several blocks,
    and the GPU has not many more programs than multiprocessors.

    In a decode step, programs are placed while earlier kernels still occupy multiprocessors, and two of them may share one while others are idle.
    With four stages, 64 rows and columns take so much shared memory that a multiprocessor has room for one program only."""
    steps, columns = -(-inner // TILE), -(-width // 64)
    short, warps, stages = steps <= SHORT, 4, 3
    if rows <= FEW:
        block_rows, programs, shortest = 16, 400, 3 if columns <= 32 else 8
    elif short and (rows <= 32 or (rows <= 64 and columns <= 40)):
        block_rows, programs, shortest, stages = 16, MULTIPROCESSORS, 3, 4
    elif rows <= 32:
        block_rows, programs, shortest = 32, 2 * MULTIPROCESSORS, 4
    else:
        block_rows, programs, shortest = 64, 2 * MULTIPROCESSORS, 8
    tiles = columns * -(-rows // block_rows)
    sharing = 4 if rows <= 64 else 2 if rows <= (128 if short else 192) else 1
    most = max(1, min(programs // tiles, steps // shortest, sharing))
    splits = 1 << (most.bit_length() - 1)
    if block_rows == 64 and tiles * splits <= MULTIPROCESSORS:
        stages = 4
    elif block_rows == 64 and splits == 4:
        warps = 8
    return block_rows, 64, splits, warps, stages


def expert_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Mapping[str, Tensor],
    names: tuple[str, str],
    row: Tensor | None,
    ends: Tensor,
    places: int,
    config: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Multiply the sorted rows of experts by their matrices; the first half of standard experts with its gate.

    Args:
        x: codes [rows, K] E4M3.
        x_scales: [rows', blocks] with strides (1, rows').
        weight: codes [experts, N, K] and scales [experts, N / 128, ceil(K / 128)].
        names: the names of both.
        row: [places] row of ``x`` of each sorted place, for a weight of gates [N / 2] above ups; None multiplies ``x`` [places, K] itself.
        ends: [experts] int32, where each expert's places end.
        places: number of sorted places.
        config: BLOCK_ROWS, BLOCK_COLUMNS, warps and stages; None chooses.

    Returns:
        [places, N / 2] ``silu(gate) * up``, or [places, N].
    """
    codes, scales = weight[names[0]], weight[names[1]]
    experts, width, inner = codes.shape
    width = width if row is None else width // 2
    average = max(1, 2 * places // experts)
    chosen = (min(64, max(16, 1 << (average - 1).bit_length())), 64, 4, 3)
    block_rows, block_columns, warps, stages = config or chosen
    out = torch.empty(places, width, dtype=torch.bfloat16, device=x.device)
    with torch.cuda.device(x.device):
        # fmt: off
        _experts[-(-width // block_columns), experts](
            x, x_scales, codes, scales, ends if row is None else row, ends, out, width, inner, x_scales.stride(1), GATED=row is not None,
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, TILE=TILE, num_warps=warps, num_stages=stages, **overlap(x),
        )
        # fmt: on
    return out
