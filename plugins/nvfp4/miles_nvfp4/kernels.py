"""The conversions of ``format`` as Triton kernels: quantisation, dequantisation, and a matrix's largest magnitude.

Their results are bitwise equal to the reference: every operation rounds once to FP32 in the same order (``div_rn`` is the correctly rounded
division), maxima are taken over the bit patterns of magnitudes, where NaN is the largest, and the GPU's conversion to E4M3 rounds to nearest
even. Quantisation with four over six has no kernel, because it adds squared errors in element order; the reference computes it. Checked by
``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16
ROWS, COLUMNS = 8, 512  # of one program
WIDE = 4096  # columns of an activation's row that are in registers at once, at most
FP32_MAX = tl.constexpr(3.4028234663852886e38)
PROPAGATE = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _amax(
    x_ptr,
    amax_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # A program handles whole rows: one atomic operation per tile would take longer than reading the tile.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        place = row * row_stride + column.to(tl.int64) * column_stride
        x = tl.load(x_ptr + place, mask=(row < rows) & (column < columns), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _outer_scale(amax):
    """Return S/6, the factor of block maxima, and 1/S for FP32 ``amax``."""
    encode = tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), amax)  # 448 * 6
    encode = tl.where(amax == 0, 1.0, tl.minimum(encode, FP32_MAX, propagate_nan=PROPAGATE))
    one = tl.full(amax.shape, 1.0, tl.float32)
    return encode * tl.div_rn(one, one * 6.0), tl.div_rn(one, encode)


@triton.jit
def _outer(amax_ptr, factor_ptr, decode_ptr, input_scale_ptr):
    place = tl.zeros((1,), tl.int32)
    factor, decode = _outer_scale(tl.load(amax_ptr + place))
    tl.store(factor_ptr + place, factor)
    tl.store(decode_ptr + place, decode)
    tl.store(input_scale_ptr + place, tl.full((1,), 1.0, tl.float32))


@triton.jit
def _blocks(x, factor, decode):
    """Return the E4M3 scales [rows, blocks] of x [rows, blocks, 16], and the factor of the block's values, 0 for a block of scale 0."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    scales = tl.minimum(largest * factor, 448.0, propagate_nan=PROPAGATE).to(tl.float8e4nv)
    wide = scales.to(tl.float32)
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), wide * decode)
    inverse = tl.minimum(inverse, FP32_MAX, propagate_nan=PROPAGATE)
    return scales, tl.where(wide == 0, 0.0, inverse)


@triton.jit
def _codes(x, inverse):
    """Return 0x4B400000 plus the nearest E2M1 code of x * inverse, ties to even, saturating; 0 for a block of scale 0, and arbitrary for
    NaN, whose block has a NaN scale.

    The index of a magnitude m is the smallest of 2 m, m + 2 and m / 2 + 4, rounded to an integer, ties to even. Adding 1.5 * 2^23 does that
    and leaves the integer in the low bits of the sum, 0x4B400000 plus the index. Each sum rounds once, as 2 m and m / 2 are exact."""
    scaled = x * inverse[:, :, None]
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    halves = (magnitude * 2.0 + 12582912.0).to(tl.int32, bitcast=True)
    ones = (magnitude + 12582914.0).to(tl.int32, bitcast=True)
    twos = (magnitude * 0.5 + 12582916.0).to(tl.int32, bitcast=True)
    signs = tl.where(inverse == 0, 0, 8)[:, :, None]
    return tl.minimum(tl.minimum(halves, ones), twos) + ((scaled.to(tl.int32, bitcast=True) >> 28) & signs)


@triton.jit
def _e2m1_value(code):
    """Return the FP32 value of a code: its magnitude bits are those of an FP32 number 2^126 times smaller, a denormal for index 1."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _quantize(
    x_ptr,
    factor_ptr,
    decode_ptr,
    out_ptr,
    scales_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = row * row_stride + column.to(tl.int64) * column_stride
    x = tl.load(x_ptr + place, mask=(row < rows) & (column < columns), other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, BLOCKS, BLOCK))
    scales, inverse = _blocks(x, tl.load(factor_ptr), tl.load(decode_ptr))
    # four bits each, the even one lowest; the byte drops what is above them
    shift = (tl.arange(0, 2) * 4)[None, None, :]
    codes = tl.sum(tl.reshape(_codes(x, inverse), (ROWS, COLUMNS // 2, 2)) << shift, 2)
    pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    tl.store(out_ptr + row * (columns // 2) + pair, codes.to(tl.uint8), mask=(row < rows) & (pair < columns // 2))
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    within = (row < rows) & (block < columns // BLOCK)
    tl.store(scales_ptr + row * (columns // BLOCK) + block, scales, mask=within)


@triton.jit
def _activation(
    x_ptr,
    out_ptr,
    columns,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program handles a whole row: the second loop reads what the first one left in the cache.
    x_ptr += tl.program_id(0).to(tl.int64) * row_stride
    out_ptr += tl.program_id(0).to(tl.int64) * columns
    largest = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column.to(tl.int64) * column_stride, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True) + tl.zeros((1, 1), tl.float32)
    factor, decode = _outer_scale(amax)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + column.to(tl.int64) * column_stride, mask=column < columns, other=0.0).to(tl.float32)
        x = tl.reshape(x, (1, COLUMNS // BLOCK, BLOCK))
        scales, inverse = _blocks(x, factor, decode)
        value = _e2m1_value(_codes(x, inverse)) * scales.to(tl.float32)[:, :, None]
        value = tl.reshape(value * decode[:, :, None], (COLUMNS,))
        tl.store(out_ptr + column, value.to(out_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def _value(
    codes_ptr,
    scales_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    within = (row < rows) & (pair < columns // 2)
    codes = tl.load(codes_ptr + row * (columns // 2) + pair, mask=within, other=0).to(tl.int32)
    shift = (tl.arange(0, 2) * 4)[None, None, :]
    value = tl.reshape(_e2m1_value((codes[:, :, None] >> shift) & 15), (ROWS, BLOCKS, BLOCK))
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    within = (row < rows) & (block < columns // BLOCK)
    scales = tl.load(scales_ptr + row * (columns // BLOCK) + block, mask=within, other=0.0).to(tl.float32)
    value = tl.reshape(value * scales[:, :, None], (ROWS, COLUMNS)) * tl.load(scale_ptr)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + row * columns + column, value, mask=(row < rows) & (column < columns))


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of x [M, K], any strides, as an FP32 scalar; NaN if x has a NaN."""
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    with torch.cuda.device(x.device):
        _amax[(triton.cdiv(x.shape[0], ROWS),)](x, found, *x.shape, *x.stride(), ROWS, COLUMNS, num_warps=4)
    return found.view(torch.float32)


def quantize(weight: Tensor, amax: Tensor, codes: Tensor, scales: Tensor, scale: Tensor, input_scale: Tensor) -> None:
    """Quantise weight [N, K], any strides, with its FP32 scalar ``amax``, into contiguous ``codes`` uint8 [N, K/2], ``scales`` E4M3
    [N, K/16] and ``scale``, an FP32 scalar; the scalar ``input_scale`` becomes 1."""
    factor = torch.empty_like(amax)
    with torch.cuda.device(weight.device):
        _outer[(1,)](amax, factor, scale, input_scale, num_warps=1)
        _quantize[_grid(weight)](
            weight, factor, scale, codes, scales, *weight.shape, *weight.stride(), ROWS, COLUMNS, BLOCK, num_warps=4
        )


def fake_quantize(x: Tensor) -> Tensor:
    """Quantise x [M, K], any strides, with an outer scale per row, and dequantise it to x's dtype."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    wide = max(BLOCK, min(WIDE, triton.next_power_of_2(columns)))
    with torch.cuda.device(x.device):
        _activation[(rows,)](x, out, columns, *x.stride(), wide, BLOCK, num_warps=max(1, wide * 4 // WIDE))
    return out


def dequantize(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Dequantise contiguous codes and scales of ``quantize`` to [N, K] FP32."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    with torch.cuda.device(codes.device):
        _value[_grid(out)](codes, scales, scale, out, rows, columns, ROWS, COLUMNS, BLOCK, num_warps=4)
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], ROWS), triton.cdiv(x.shape[1], COLUMNS)
