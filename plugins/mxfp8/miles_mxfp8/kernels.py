"""The conversions of ``format`` as Triton kernels, which read their input once and write codes and scales, or dequantised values.

Their results are bitwise equal to the reference. A block's maximum is taken over bit patterns (which order like magnitudes, including
denormals and NaN); exponent and mantissa are read from the bits, as frexp does; dividing by a power of two is an exact multiplication by its
inverse; and the GPU's conversion to E4M3 rounds to nearest even. Checked by ``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
ROWS, COLUMNS = 8, 512  # of one program


@triton.jit
def _scale_byte(amax_bits):
    """Return the scale byte (int32) for the bits of a block's largest magnitude: 448 is 1.75 * 2^8, and the exponent rounds up."""
    exponent = amax_bits >> 23
    byte = exponent - 8 + tl.where((amax_bits & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(exponent == 255, 255, tl.maximum(byte, 0))


@triton.jit
def _power(byte):
    """2^(byte - 127) of a scale byte, int32 -> FP32; NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)  # 2^-127 is a denormal
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    x_ptr,
    out_ptr,
    scales_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, BLOCKS, BLOCK))
    byte = _scale_byte(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2))
    # 2^(127 - byte); a byte of 255 makes the block NaN
    inverse = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    quotient = x * inverse[:, :, None]
    codes = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    if DECODE:
        value = tl.reshape(codes.to(tl.float32) * _power(byte)[:, :, None], (ROWS, COLUMNS))
        tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + row * columns + column, tl.reshape(codes, (ROWS, COLUMNS)), mask=inside)
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        within = (row < rows) & (block < columns // BLOCK)
        tl.store(scales_ptr + row * (columns // BLOCK) + block, byte.to(tl.uint8), mask=within)


@triton.jit
def _value(
    codes_ptr, scales_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    codes = tl.load(codes_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    within = (row < rows) & (block < columns // BLOCK)
    byte = tl.load(scales_ptr + row * (columns // BLOCK) + block, mask=within, other=0).to(tl.int32)
    value = tl.reshape(codes, (ROWS, BLOCKS, BLOCK)) * _power(byte)[:, :, None]
    tl.store(out_ptr + row * columns + column, tl.reshape(value, (ROWS, COLUMNS)), mask=inside)


def quantize(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise weight [N, K], any strides, into contiguous ``codes`` E4M3 [N, K] and ``scales`` uint8 [N, K/32]."""
    _launch(weight, codes, scales, decode=False)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise contiguous codes and scales of ``quantize`` to [N, K] FP32."""
    rows, columns = codes.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    with torch.cuda.device(codes.device):
        _value[grid](codes, scales, out, rows, columns, ROWS, COLUMNS, BLOCK, num_warps=4)
    return out


def fake_quantize(x: Tensor) -> Tensor:
    """Quantise x [M, K], any strides, and dequantise it to x's dtype."""
    out = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    _launch(x, out, out, decode=True)
    return out


def _launch(x: Tensor, out: Tensor, scales: Tensor, decode: bool) -> None:
    rows, columns = x.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    with torch.cuda.device(x.device):
        _quantize[grid](x, out, scales, rows, columns, *x.stride(), decode, ROWS, COLUMNS, BLOCK, num_warps=4)
