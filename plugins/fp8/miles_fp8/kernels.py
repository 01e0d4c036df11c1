"""The rule of ``format`` as Triton kernels: each reads its input once and writes what is asked for.

They return the reference's bytes. What that takes: quotients as a true division rounds them, maxima taken over the bit patterns of
magnitudes (integers order like the numbers, denormals and NaN included), powers of two from exponent bits, and the
GPU's own conversion to E4M3, which rounds to nearest even. Checked by ``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-10)
TILE = 128
ROWS = 32  # rows of an activation one program reads
#: What a program reads and writes 16 bytes at a time has to begin at a multiple of them.
ALIGNED = tl.constexpr(16)
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _scale(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Bits of each block's largest magnitude -> its scale, FP32."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), AMAX_FLOOR)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        bits = ((bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)) << 23
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _quotient(x, scale):
    """``x / scale`` as a true division rounds it, for scales of ``_scale`` or NaN: the GPU's own division of each number takes longer than its
    memory does.

    With the reciprocal rounded to nearest, a quotient that is off by less than one unit in the last place is made right by the remainder, which
    a fused multiply-add has exactly (P. W. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990); the
    product with the reciprocal is off by up to 1.5 units, so it takes two. Where the remainder underflows, the code is 0 either way."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scale, negative = tl.broadcast_to(scale, x.shape), tl.broadcast_to(-inverse, x.shape)
    found = x * tl.broadcast_to(inverse, x.shape)
    # The remainder with its sign turned: where there is none this adds -0, which leaves -0 as it is.
    found = tl.fma(tl.fma(found, scale, -x), negative, found)
    return tl.fma(tl.fma(found, scale, -x), negative, found)


@triton.jit
def _codes(x, scale):
    # The GPU's conversion keeps what is larger at 448, and NaN as NaN: a block that is not finite has to show.
    return _quotient(x, scale).to(tl.float8e4nv)


@triton.jit
def _weight(
    x_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(bits, 1, keep_dims=True), 0, keep_dims=True)
    scale = tl.where(amax < 0x7F800000, _scale(amax, POWER_OF_TWO), float("nan"))
    codes = _codes(x, scale)
    tl.store(codes_ptr + row * columns + column, codes, mask=inside)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales_ptr + place + tl.zeros(scale.shape, tl.int32), scale)


@triton.jit
def _weights(
    table,
    rows,
    columns,
    row_stride,
    column_stride,
    KIND: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    weight = table + tl.program_id(2) * 3
    x_ptr = tl.multiple_of(tl.load(weight).to(tl.pointer_type(KIND)), ALIGNED)
    codes_ptr = tl.multiple_of(tl.load(weight + 1).to(tl.pointer_type(tl.float8e4nv)), ALIGNED)
    scales_ptr = tl.load(weight + 2).to(tl.pointer_type(tl.float32))
    _weight(x_ptr, codes_ptr, scales_ptr, rows, columns, row_stride, column_stride, POWER_OF_TWO, TILE)


@triton.jit
def _activation(
    x_ptr,
    out_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    scale = tl.where(amax < 0x7F800000, _scale(amax, POWER_OF_TWO), float("nan"))
    value = _codes(x, scale).to(tl.float32) * scale
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_codes(
    x_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    padded,
    columns,
    row_stride,
    column_stride,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    scale = tl.where(amax < 0x7F800000, _scale(amax, POWER_OF_TWO), float("nan"))
    codes = _codes(x, scale)
    # Rows added to fill up a multiple of four are written as zeros: what a product makes of them must not be NaN.
    tl.store(codes_ptr + row * columns + column, codes, mask=(row < padded) & (column < columns))
    tl.store(scales_ptr + tl.program_id(1).to(tl.int64) * padded + row, scale, mask=row < padded)


@triton.jit
def _value(
    codes_ptr, scales_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    codes = tl.load(codes_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    place = row // TILE * tl.cdiv(columns, TILE) + column // TILE
    tl.store(out_ptr + row * columns + column, codes * tl.load(scales_ptr + place, mask=inside, other=0.0), mask=inside)


def quantize(weight: Tensor, codes: Tensor, scales: Tensor, power_of_two: bool) -> None:
    """weight [N, K], any strides -> ``codes`` E4M3 [N, K] and ``scales`` FP32 [ceil(N/128), ceil(K/128)], contiguous."""
    rows, columns = weight.shape
    with torch.cuda.device(weight.device):
        _weight[tuple(scales.shape)](
            weight, codes, scales, rows, columns, *weight.stride(), power_of_two, TILE, num_warps=4
        )


def quantize_alike(weights: list[Tensor], codes: list[Tensor], scales: list[Tensor], power_of_two: bool) -> None:
    """``quantize`` of several weights of one dtype, shape and strides, whose memory and that of their codes begins at multiples of
    ``ALIGNED``, in one launch: of thousands of small experts each would take the host longer than the GPU."""
    first = weights[0]
    rows, columns = first.shape
    places = tuple(t.data_ptr() for three in zip(weights, codes, scales, strict=True) for t in three)
    with torch.cuda.device(first.device):
        stream = torch.cuda.current_stream().cuda_stream if first.is_cuda else 0
        table = _table(places, first.device, stream)
        grid = (*scales[0].shape, len(weights))
        _weights[grid](table, rows, columns, *first.stride(), KINDS[first.dtype], power_of_two, TILE, num_warps=4)


@lru_cache(1024)
def _table(places: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Addresses on a GPU, for launches of a ``stream``. Weights lie where they lay at the last sync, as a rule."""
    found = torch.tensor(places, dtype=torch.int64)
    if device.type == "cuda":
        found = found.pin_memory()  # copied from other memory it would wait for the launch before
    return found.to(device, non_blocking=True)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """What ``quantize`` wrote, contiguous -> [N, K] FP32."""
    rows, columns = codes.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns, 512))
    with torch.cuda.device(codes.device):
        _value[grid](codes, scales, out, rows, columns, 8, 512, TILE, num_warps=4)
    return out


def fake_quantize(x: Tensor, power_of_two: bool) -> Tensor:
    """x [M, K], any strides -> what its codes in blocks of 1 x 128 mean, in x's dtype."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, TILE))
    with torch.cuda.device(x.device):
        _activation[grid](x, out, rows, columns, *x.stride(), power_of_two, ROWS, TILE, num_warps=4)
    return out


def activation_codes(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """x [M, K], any strides -> codes E4M3 [M', K] and scales FP32 [M', ceil(K/128)] of its blocks of 1 x 128.

    M' is M rounded up to a multiple of 4, and scales of one block column lie together (strides 1, M'): cuBLAS reads 16
    bytes of them at a time. Rows that are added hold zeros."""
    rows, columns = x.shape
    padded, blocks = -(-rows // 4) * 4, triton.cdiv(columns, TILE)
    codes = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((blocks, padded), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(padded, ROWS), blocks)
    with torch.cuda.device(x.device):
        _activation_codes[grid](
            x, codes, scales, rows, padded, columns, *x.stride(), power_of_two, ROWS, TILE, num_warps=4
        )
    return codes, scales.t()
