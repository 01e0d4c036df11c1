"""The rule of ``format`` as Triton kernels: quantisation, dequantisation, and a matrix's largest magnitude.

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
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    place = row[:, None] * row_stride + column.to(tl.int64) * column_stride
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if PER_ROW:
        tl.atomic_max(amax_ptr + row, amax, mask=row < rows)
    else:
        tl.atomic_max(amax_ptr, tl.max(amax, 0))


@triton.jit
def _outer(amax_ptr, factor_ptr, decode_ptr, count, SIZE: tl.constexpr):
    """Compute S/6, the factor of block maxima, and 1/S for each amax."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    amax = tl.load(amax_ptr + place, mask=place < count, other=0.0)
    encode = tl.div_rn(tl.full((SIZE,), 2688.0, tl.float32), amax)  # 448 * 6
    encode = tl.where(amax == 0, 1.0, tl.minimum(encode, FP32_MAX, propagate_nan=PROPAGATE))
    one = tl.full((SIZE,), 1.0, tl.float32)
    tl.store(factor_ptr + place, encode * tl.div_rn(one, one * 6.0), mask=place < count)
    tl.store(decode_ptr + place, tl.div_rn(one, encode), mask=place < count)


@triton.jit
def _e2m1(x):
    """Return the int32 code of the nearest E2M1 number, ties to even, saturating; arbitrary for NaN, whose block has a NaN scale."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    # below 1, codes have the same spacing as from 1 to 2
    octave = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127)
    halves = magnitude * ((255 - octave) << 23).to(tl.float32, bitcast=True)
    # adding 1.5 * 2^23 rounds to an integer, ties to even, which is then in the low bits of the sum
    index = (halves + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + 2 * (octave - 127)
    return index | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_value(code):
    """Return the FP32 value of a code: 0 and .5, then m * 2^(e - 1) with one mantissa bit."""
    index = code & 7
    bits = tl.where(index == 0, 0, tl.where(index == 1, 0x3F000000, ((index >> 1) + 126 << 23) | ((index & 1) << 22)))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


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
    PER_ROW: tl.constexpr,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    place = row * row_stride + column.to(tl.int64) * column_stride
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, BLOCKS, BLOCK))
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    if PER_ROW:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)
        decode = tl.load(decode_ptr + row, mask=row < rows, other=0.0)
    else:
        factor = tl.load(factor_ptr)
        decode = tl.load(decode_ptr)
    scales = tl.minimum(largest * factor, 448.0, propagate_nan=PROPAGATE).to(tl.float8e4nv)
    wide = scales.to(tl.float32)
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), wide * decode)
    inverse = tl.minimum(inverse, FP32_MAX, propagate_nan=PROPAGATE)
    codes = tl.where((wide == 0)[:, :, None], 0, _e2m1(x * inverse[:, :, None]))
    if DECODE:
        value = tl.reshape(_e2m1_value(codes) * wide[:, :, None], (ROWS, COLUMNS)) * decode
        tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
        pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
        within = (row < rows) & (pair < columns // 2)
        tl.store(out_ptr + row * (columns // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=within)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        within = (row < rows) & (block < columns // BLOCK)
        tl.store(scales_ptr + row * (columns // BLOCK) + block, scales, mask=within)


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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    pair = tl.load(codes_ptr + row * (columns // 2) + column // 2, mask=inside, other=0).to(tl.int32)
    value = _e2m1_value((pair >> ((column & 1) * 4)) & 15)
    block = tl.load(scales_ptr + row * (columns // BLOCK) + column // BLOCK, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, value * block * tl.load(scale_ptr), mask=inside)


def largest(x: Tensor, per_row: bool = False) -> Tensor:
    """Return the largest magnitude of x [M, K], any strides: an FP32 scalar, or [M] per row; NaN if x has a NaN."""
    shape = (x.shape[0],) if per_row else ()
    found = torch.zeros(shape, dtype=torch.int32, device=x.device)
    with torch.cuda.device(x.device):
        _amax[_grid(x)](x, found, *x.shape, *x.stride(), per_row, ROWS, COLUMNS, num_warps=4)
    return found.view(torch.float32)


def quantize(weight: Tensor, amax: Tensor, codes: Tensor, scales: Tensor, scale: Tensor) -> None:
    """Quantise weight [N, K], any strides, with its FP32 scalar ``amax``, into contiguous ``codes`` uint8 [N, K/2], ``scales`` E4M3
    [N, K/16] and ``scale``, an FP32 scalar."""
    _launch(weight, amax, codes, scales, scale, decode=False)


def fake_quantize(x: Tensor) -> Tensor:
    """Quantise x [M, K], any strides, with an outer scale per row, and dequantise it to x's dtype."""
    amax = largest(x, per_row=True)
    out = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    _launch(x, amax, out, out, torch.empty_like(amax), decode=True)
    return out


def _launch(x: Tensor, amax: Tensor, out: Tensor, scales: Tensor, scale: Tensor, decode: bool) -> None:
    """Launch the kernel. amax: a scalar or [M]; scale: receives 1/S, shaped as ``amax``."""
    factor, strides, count = torch.empty_like(amax), x.stride(), amax.numel()
    with torch.cuda.device(x.device):
        _outer[(triton.cdiv(count, 256),)](amax, factor, scale, count, 256, num_warps=4)
        sizes = (amax.ndim == 1, decode, ROWS, COLUMNS, BLOCK)
        _quantize[_grid(x)](x, factor, scale, out, scales, *x.shape, *strides, *sizes, num_warps=4)


def dequantize(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Dequantise contiguous codes and scales of ``quantize`` to [N, K] FP32."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    with torch.cuda.device(codes.device):
        _value[_grid(out)](codes, scales, scale, out, rows, columns, ROWS, COLUMNS, BLOCK, num_warps=4)
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], ROWS), triton.cdiv(x.shape[1], COLUMNS)
