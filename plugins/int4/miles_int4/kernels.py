"""The rule of ``format`` as Triton kernels, which read a weight once and write packed codes and scales, or the reverse.

Their results are bitwise equal to the reference: correctly rounded divisions (``div_rn``), maxima over the bit patterns of magnitudes,
scales rounded to BF16 before the division, and ties to even. Checked by ``FormatContract`` and tests/test_kernels.py.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

PER_WORD = 8
ROWS, COLUMNS = 8, 512  # block of one program; a larger group has a separate program


@triton.jit
def _quantize(
    x_ptr,
    words_ptr,
    scales_ptr,
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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 7.0, tl.float32)), 1e-5).to(tl.bfloat16)
    quotient = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, :, None], x.shape))
    # adding 1.5 * 2^23 rounds to an integer, ties to even, which is then in the low bits of the sum
    code = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    nibble = tl.minimum(tl.maximum(code, -7), 7) + 8
    shift = (tl.arange(0, PER_WORD) * 4)[None, None, :]
    words = tl.sum(tl.reshape(nibble, (ROWS, WORDS, PER_WORD)) << shift, 2)
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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    word = tl.load(words_ptr + row * (columns // PER_WORD) + column // PER_WORD, mask=inside, other=0)
    code = ((word >> (column % PER_WORD * 4)) & 15) - 8
    scale = tl.load(scales_ptr + row * (columns // GROUP) + column // GROUP, mask=inside, other=0.0)
    tl.store(out_ptr + row * columns + column, code.to(tl.float32) * scale.to(tl.float32), mask=inside)


def suits(group_size: int) -> bool:
    """Whether the kernel supports this group size: a power of two, and whole words."""
    return PER_WORD <= group_size <= 4096 and group_size & (group_size - 1) == 0


def quantize(weight: Tensor, words: Tensor, scales: Tensor, group_size: int) -> None:
    """Quantise weight [N, K], any strides, into contiguous ``words`` int32 [N, K/8] and ``scales`` BF16 [N, K/g]."""
    rows, columns = weight.shape
    wide = max(COLUMNS, group_size)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, wide))
    with torch.cuda.device(weight.device):
        _quantize[grid](
            weight, words, scales, rows, columns, *weight.stride(), ROWS, wide, group_size, PER_WORD, num_warps=4
        )


def dequantize(words: Tensor, scales: Tensor) -> Tensor:
    """Dequantise contiguous words and scales of ``quantize``, any group size, to [N, K] FP32."""
    rows, columns = words.shape[0], words.shape[1] * PER_WORD
    out = torch.empty((rows, columns), dtype=torch.float32, device=words.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    group = columns // scales.shape[1]
    with torch.cuda.device(words.device):
        _value[grid](words, scales, out, rows, columns, ROWS, COLUMNS, group, PER_WORD, num_warps=4)
    return out
