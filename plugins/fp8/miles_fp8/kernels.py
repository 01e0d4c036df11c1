"""The conversions of ``format`` as Triton kernels; each reads its input once.

Their results are bitwise equal to the reference. This needs correctly rounded quotients, maxima over the bit patterns of magnitudes (which
order like the numbers, including denormals and NaN), powers of two from exponent bits, and the GPU's conversion to E4M3, which rounds to
nearest even. Checked by ``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.overlap import overlap, release, wait

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-10)
TILE = 128
WARPS = 8  # of a program that quantises a tile; with 4, too few tiles fit into the registers to keep memory busy
ROWS = 32  # rows of an activation one program reads
#: Required alignment in bytes of memory that a program accesses 16 bytes at a time.
ALIGNED = tl.constexpr(16)
#: Most weights of a launch; the third dimension of a grid is limited to 65,535.
MOST = 1 << 15
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _scale(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Return the FP32 scale for the bits of each block's largest magnitude."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), AMAX_FLOOR)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        bits = ((bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)) << 23
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _quotient(x, scale):
    """Return ``x / scale``, correctly rounded, for scales of ``_scale`` or NaN. The GPU's division instruction would take longer than the
    memory access.

    With a reciprocal rounded to nearest, a quotient with an error below one ulp is corrected by its remainder, which a fused multiply-add
    computes exactly (P. W. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990). The product with the
    reciprocal has an error of up to 1.5 ulp, so two corrections are needed. If the remainder underflows, the code is 0 either way."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scale, negative = tl.broadcast_to(scale, x.shape), tl.broadcast_to(-inverse, x.shape)
    found = x * tl.broadcast_to(inverse, x.shape)
    # the negated remainder: if it is zero, this adds -0, which keeps -0 unchanged
    found = tl.fma(tl.fma(found, scale, -x), negative, found)
    return tl.fma(tl.fma(found, scale, -x), negative, found)


@triton.jit
def _codes(x, scale):
    # the GPU's conversion saturates at 448 and keeps NaN, so that non-finite blocks are visible
    return _quotient(x, scale).to(tl.float8e4nv)


@triton.jit
def _quantized(x, POWER_OF_TWO: tl.constexpr):
    """Return the codes of x [M, K] FP32, one block per row, and the blocks' scales [M, 1]."""
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    scale = tl.where(amax < 0x7F800000, _scale(amax, POWER_OF_TWO), float("nan"))
    return _codes(x, scale), scale


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
def _fake_weights(
    x_ptr,
    out_ptr,
    scales_ptr,
    rows,
    columns,
    x_step,
    x_row,
    x_column,
    out_step,
    out_row,
    out_column,
    POWER_OF_TWO: tl.constexpr,
    TILE: tl.constexpr,
):
    weight = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + weight * x_step + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True), 0, keep_dims=True)
    scale = tl.where(amax < 0x7F800000, _scale(amax, POWER_OF_TWO), float("nan"))
    value = (_codes(x, scale).to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + weight * out_step + row * out_row + column * out_column, value, mask=inside)
    place = (weight * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales_ptr + place + tl.zeros(scale.shape, tl.int32), scale)


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
    codes, scale = _quantized(x, POWER_OF_TWO)
    value = codes.to(tl.float32) * scale
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
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    codes, scale = _quantized(x, POWER_OF_TWO)
    # padding rows are written as zeros, so that GEMMs do not produce NaN for them
    tl.store(codes_ptr + row * columns + column, codes, mask=(row < padded) & (column < columns))
    tl.store(scales_ptr + tl.program_id(1).to(tl.int64) * padded + row, scale, mask=row < padded)


@triton.jit
def _value(
    codes_ptr,
    scales_ptr,
    out_ptr,
    rows,
    columns,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    codes = tl.load(codes_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    place = row // TILE * tl.cdiv(columns, TILE) + column // TILE
    value = codes * tl.load(scales_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + row * row_stride + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _values(
    table,
    rows,
    columns,
    row_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    weight = table + tl.program_id(2) * 3
    codes_ptr = tl.multiple_of(tl.load(weight).to(tl.pointer_type(tl.float8e4nv)), ALIGNED)
    scales_ptr = tl.load(weight + 1).to(tl.pointer_type(tl.float32))
    out_ptr = tl.multiple_of(tl.load(weight + 2).to(tl.pointer_type(KIND)), ALIGNED)
    _value(codes_ptr, scales_ptr, out_ptr, rows, columns, row_stride, ROWS, COLUMNS, TILE)


def quantize(weight: Tensor, codes: Tensor, scales: Tensor, power_of_two: bool) -> None:
    """Quantise weight [N, K], any strides, into contiguous ``codes`` E4M3 [N, K] and ``scales`` FP32 [ceil(N/128), ceil(K/128)]."""
    rows, columns = weight.shape
    with torch.cuda.device(weight.device):
        _weight[tuple(scales.shape)](
            weight, codes, scales, rows, columns, *weight.stride(), power_of_two, TILE, num_warps=WARPS
        )


def quantize_alike(weights: list[Tensor], codes: list[Tensor], scales: list[Tensor], power_of_two: bool) -> None:
    """Quantise several weights of the same dtype, shape and strides in one launch; weights and codes must be aligned to ``ALIGNED``.

    With thousands of small experts, separate launches would take longer on the host than the work on the GPU."""
    with torch.cuda.device(weights[0].device):
        _launch(_table_of(weights, codes, scales), weights[0], tuple(scales[0].shape), len(weights), power_of_two)


def prepare_alike(
    weights: list[Tensor], codes: list[Tensor], scales: list[Tensor], power_of_two: bool
) -> list[Callable[[], None]]:
    """Return the launches of ``quantize_alike``, for any stream, which read the addresses of these tensors now. The caller keeps the tensors."""
    launches: list[Callable[[], None]] = []
    for at in range(0, len(weights), MOST):
        part = slice(at, at + MOST)
        table = torch.tensor(_places(weights[part], codes[part], scales[part]), dtype=torch.int64)
        # the copy is complete when this returns, so that any stream may read it
        table = table.to(weights[0].device)
        like, tiles, count = weights[0], tuple(scales[0].shape), len(weights[part])
        launches.append(partial(_launch_on_device, table, like, tiles, count, power_of_two))
    return launches


def _launch_on_device(table: Tensor, like: Tensor, tiles: tuple[int, ...], count: int, power_of_two: bool) -> None:
    with torch.cuda.device(like.device):
        _launch(table, like, tiles, count, power_of_two)


def _launch(table: Tensor, like: Tensor, tiles: tuple[int, ...], count: int, power_of_two: bool) -> None:
    """Quantise ``count`` weights with the layout of ``like``, whose addresses are in ``table``."""
    sizes = *like.shape, *like.stride()
    _weights[*tiles, count](table, *sizes, KINDS[like.dtype], power_of_two, TILE, num_warps=WARPS)


def fake_quantize_weights(weights: Tensor, out: Tensor, power_of_two: bool) -> Tensor:
    """Write the values of quantised weights [count, N, K], any strides, to ``out``; returns their scales [count, ceil(N/128), ceil(K/128)]."""
    count, rows, columns = weights.shape
    tiles = -(-rows // TILE), -(-columns // TILE)
    scales = torch.empty((count, *tiles), dtype=torch.float32, device=weights.device)
    with torch.cuda.device(weights.device):
        strides = *weights.stride(), *out.stride()
        _fake_weights[*tiles, count](weights, out, scales, rows, columns, *strides, power_of_two, TILE, num_warps=WARPS)
    return scales


def dequantize_alike(codes: list[Tensor], scales: list[Tensor], outs: list[Tensor]) -> None:
    """Dequantise several weights to ``outs`` of the same dtype, shape and strides, with contiguous rows, in one launch; codes and outs must
    be aligned to ``ALIGNED``."""
    first = outs[0]
    rows, columns = first.shape
    grid = (-(-rows // 8), -(-columns // 512), len(outs))
    with torch.cuda.device(first.device):
        table = _table_of(codes, scales, outs)
        _values[grid](table, rows, columns, first.stride(0), KINDS[first.dtype], 8, 512, TILE, num_warps=4)


def _table_of(*columns: list[Tensor]) -> Tensor:
    """Return the addresses of the tensors, one row for each weight, for launches on the current stream."""
    device = columns[0][0].device
    return _table(_places(*columns), device, torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0)


def _places(*columns: list[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for row in zip(*columns, strict=True) for tensor in row])


@lru_cache(1024)
def _table(places: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return a GPU tensor of addresses for launches on ``stream``; cached, because addresses rarely change between syncs."""
    found = torch.tensor(places, dtype=torch.int64)
    if device.type == "cuda":
        found = found.pin_memory()  # a copy from pageable memory would wait for the previous launch
    return found.to(device, non_blocking=True)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantise contiguous codes and scales of ``quantize`` to [N, K] FP32."""
    rows, columns = codes.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device=codes.device)
    grid = (-(-rows // 8), -(-columns // 512))
    with torch.cuda.device(codes.device):
        _value[grid](codes, scales, out, rows, columns, columns, 8, 512, TILE, num_warps=4)
    return out


def fake_quantize(x: Tensor, power_of_two: bool) -> Tensor:
    """Quantise x [..., K], any strides, in blocks of 1 x 128 and dequantise it to x's dtype."""
    flat, out = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, columns = flat.shape
    grid = (-(-rows // ROWS), -(-columns // TILE))
    with torch.cuda.device(x.device):
        _activation[grid](flat, out, rows, columns, *flat.stride(), power_of_two, ROWS, TILE, num_warps=4)
    return out


def allocate_codes(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the results of ``activation_codes``: codes [M', K], and the transposed scales [ceil(K/128), M']."""
    padded = -(-rows // 4) * 4
    codes = torch.empty((padded, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((-(-columns // TILE), padded), dtype=torch.float32, device=device)


def activation_codes(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Quantise x [M, K], any strides, to codes E4M3 [M', K] and scales FP32 [M', ceil(K/128)] in blocks of 1 x 128.

    M' is M rounded up to a multiple of 4; the added rows are zero. Scales are column-major (strides 1, M'), because cuBLAS reads 16 bytes
    of a block column at a time."""
    rows, columns = x.shape
    codes, scales = allocate_codes(rows, columns, x.device)
    blocks, padded = scales.shape
    grid = (-(-padded // ROWS), blocks)
    with torch.cuda.device(x.device):
        sizes = rows, padded, columns, *x.stride()
        _activation_codes[grid](x, codes, scales, *sizes, power_of_two, ROWS, TILE, **overlap(x), num_warps=4)
    return codes, scales.t()
