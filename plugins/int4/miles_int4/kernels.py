"""The conversions of ``format`` as Triton kernels, which read a weight once and write packed codes and scales, or the reverse.

Their results are bitwise equal to the reference: correctly rounded quotients, maxima over the bit patterns of magnitudes, scales rounded to
BF16 before the division, and ties to even. Each thread handles whole words, so that memory is accessed 16 bytes at a time. Checked by
``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

PER_WORD = 8
#: Eight times 0x4B400000 - 8, each shifted by four more bits, as a signed 32-bit number.
NEUTRAL = tl.constexpr((sum((0x4B400000 - 8) << 4 * i for i in range(8)) + (1 << 31)) % (1 << 32) - (1 << 31))
ROWS, COLUMNS = 8, 512  # block of one program; a larger group has a separate program


@triton.jit
def _quotient(x, scale):
    """Return ``x / scale``, correctly rounded, for positive normal scales of eight significant bits; tiny quotients, whose code is 0, may
    be off.

    The product with the rounded reciprocal has an error of up to 1.5 ulp. Its remainder is exact (fused multiply-add), and one correction
    brings it within 2^-23 ulp of the quotient. The quotient of 24 by 8 significant bits is at least 2^-9 ulp away from the middle of two
    numbers, so the correction rounds to the same number as a division."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scale, inverse = tl.broadcast_to(-scale, x.shape), tl.broadcast_to(inverse, x.shape)
    found = x * inverse
    return tl.fma(tl.fma(found, scale, x), inverse, found)


@triton.jit
def _quantize(
    x_ptr,
    words_ptr,
    scales_ptr,
    shape_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
):
    GROUPS: tl.constexpr = COLUMNS // GROUP
    WORDS: tl.constexpr = COLUMNS // PER_WORD
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(shape_ptr, rows)
        tl.store(shape_ptr + 1, columns)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 7.0, tl.float32)), 1e-5).to(tl.bfloat16)
    quotient = _quotient(x, scale.to(tl.float32)[:, :, None])
    # Adding 1.5 * 2^23 rounds to an integer, ties to even, which is then in the low bits of the sum: 0x4B400000 plus the code. Codes need
    # no limit, because no finite weight exceeds 7.02 scales. The constant subtracts 0x4B400000 - 8 for each of the eight.
    bits = (quotient + 12582912.0).to(tl.int32, bitcast=True)
    shift = (tl.arange(0, PER_WORD) * 4)[None, None, :]
    words = tl.sum(tl.reshape(bits, (ROWS, WORDS, PER_WORD)) << shift, 2) - NEUTRAL
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(words_ptr + row * (columns // PER_WORD) + word, words, mask=(row < rows) & (word < columns // PER_WORD))
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    tl.store(scales_ptr + row * (columns // GROUP) + group, scale, mask=(row < rows) & (group < columns // GROUP))


@triton.jit
def _value(
    words_ptr,
    scales_ptr,
    out_ptr,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
):
    WORDS: tl.constexpr = COLUMNS // PER_WORD
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(
        words_ptr + row * (columns // PER_WORD) + word, mask=(row < rows) & (word < columns // PER_WORD), other=0
    )
    shift = (tl.arange(0, PER_WORD) * 4)[None, None, :]
    code = tl.reshape(((words[:, :, None] >> shift) & 15) - 8, (ROWS, COLUMNS)).to(tl.float32)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    if COLUMNS % GROUP == 0:
        GROUPS: tl.constexpr = COLUMNS // GROUP
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
        within = (row < rows) & (group < columns // GROUP)
        scale = tl.load(scales_ptr + row * (columns // GROUP) + group, mask=within, other=0.0).to(tl.float32)
        value = tl.reshape(tl.reshape(code, (ROWS, GROUPS, GROUP)) * scale[:, :, None], (ROWS, COLUMNS))
    else:
        scale = tl.load(scales_ptr + row * (columns // GROUP) + column // GROUP, mask=inside, other=0.0)
        value = code * scale.to(tl.float32)
    tl.store(out_ptr + row * columns + column, value, mask=inside)


def suits(group_size: int) -> bool:
    """Whether the kernel supports this group size: a power of two, and whole words."""
    return PER_WORD <= group_size <= 4096 and group_size & (group_size - 1) == 0


def quantize(weight: Tensor, words: Tensor, scales: Tensor, shape: Tensor, group_size: int) -> None:
    """Quantise weight [N, K], any strides, into contiguous ``words`` int32 [N, K/8], ``scales`` BF16 [N, K/g] and ``shape`` int32 [2]."""
    rows, columns = weight.shape
    wide = max(COLUMNS, group_size)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, wide))
    with torch.cuda.device(weight.device):
        sizes = (ROWS, wide, group_size, PER_WORD)
        _quantize[grid](weight, words, scales, shape, rows, columns, *weight.stride(), *sizes, num_warps=4)


def dequantize(words: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Dequantise contiguous words and scales of ``quantize``, any group size, to [N, K] FP32, or to a contiguous ``out`` of any floating dtype,
    rounded once."""
    rows, columns = words.shape[0], words.shape[1] * PER_WORD
    if out is None:
        out = torch.empty((rows, columns), dtype=torch.float32, device=words.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    group = columns // scales.shape[1]
    with torch.cuda.device(words.device):
        _value[grid](words, scales, out, rows, columns, ROWS, COLUMNS, group, PER_WORD, num_warps=4)
    return out
