"""Log-softmax of logits on a GPU with one program per row, whatever the vocabulary.

PyTorch reads a row in pieces that depend on the alignment of its first entry, and so on the row's number where the vocabulary is not a multiple
of 4.

A row is read in blocks of columns. One kernel sums the exponentials of each column, entry by entry, and a second one adds the columns. The order
of additions in the second kernel may depend on the layout that the compiler chooses, but it always reads FP32, so it is the same for logits of
every type. The log-probability of an entry is the entry minus the level and the log of the sum of its row, whether all entries are wanted or one
per row: subtractions have one result, so both ways have the same bits. With one per row, neither the converted nor the normalised rows, nor the
gradient of a gather, are written to memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a block.
_BLOCK = 4096


# fmt: off
@triton.jit
def _load(x, divisor, known, DIVIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load logits as FP32, divided by the temperature as PyTorch divides."""
    entry = tl.load(x, mask=known, other=-float("inf")).to(tl.float32)
    if DIVIDE:
        entry = tl.div_rn(entry, tl.full(entry.shape, 1.0, tl.float32) * divisor)
    return entry


@triton.jit
def _sum_columns(  # type: ignore[no-untyped-def]
    x, temperatures, levels, columns, width, x_row, temperature_row, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source, divisor = x + row * x_row, tl.load(temperatures + row * temperature_row)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        entry = _load(source + first + column, divisor, first + column < width, DIVIDE)
        now = tl.where(entry > highest, entry, highest)  # never NaN
        shift = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp(highest - shift) + tl.exp(entry - shift)  # NaN where the entry is
        highest = now
    top = tl.max(highest, 0)
    level = tl.where(top == -float("inf"), 0.0, top)
    tl.store(levels + row * 2, level)
    tl.store(columns + row * BLOCK + column, total * tl.exp(highest - level))


@triton.jit
def _add_columns(columns, levels, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tl.store(levels + row * 2 + 1, tl.log(tl.sum(tl.load(columns + row * BLOCK + tl.arange(0, BLOCK)), 0)))


@triton.jit
def _subtract(x, levels, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    level, log_total = tl.load(levels + row * 2), tl.load(levels + row * 2 + 1)
    entry = tl.load(x + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, entry - level - log_total, mask=column < width)


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    x, temperatures, levels, tokens, out, x_row, temperature_row, DIVIDE: tl.constexpr,
):
    row, one = tl.program_id(0).to(tl.int64), tl.arange(0, 1)
    divisor = tl.load(temperatures + row * temperature_row)
    entry = _load(x + row * x_row + tl.load(tokens + row) + one, divisor, one < 1, DIVIDE)
    tl.store(out + row + one, entry - tl.load(levels + row * 2) - tl.load(levels + row * 2 + 1))


@triton.jit
def _pick_backward(  # type: ignore[no-untyped-def]
    grad, x, temperatures, levels, tokens, out, width, x_row, temperature_row, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    level, log_total, given = tl.load(levels + row * 2), tl.load(levels + row * 2 + 1), tl.load(grad + row)
    divisor = tl.load(temperatures + row * temperature_row)
    entry = _load(x + row * x_row + column, divisor, column < width, DIVIDE)
    chosen = tl.where(column == tl.load(tokens + row), 1.0, 0.0)
    result = given * (chosen - tl.exp(entry - level - log_total))
    if DIVIDE:
        result = result / divisor
    tl.store(out + row * width + column, result, mask=column < width)

# fmt: on


def log_softmax(x: Tensor) -> Tensor:
    """Normalise x [..., width] FP32 over the last dimension; returns [..., width] FP32."""
    out: Tensor = _LogSoftmax.apply(x)
    return out


def pick_log_softmax(x: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return [rows] FP32: ``log_softmax`` of x [rows, width], converted to FP32 and divided by ``temperature``, at ``tokens`` [rows], with the
    same bits.

    Args:
        x: of any type up to FP32.
        tokens: int64.
        temperature: a number, or one per row [rows, 1] FP32.
    """
    divides = isinstance(temperature, Tensor) or temperature != 1.0
    if not isinstance(temperature, Tensor):
        temperature = torch.full((1, 1), temperature, dtype=torch.float32, device=x.device)
    out: Tensor = _Picked.apply(x, tokens, temperature, divides)
    return out


def _levels(x: Tensor, temperature: Tensor, divides: bool) -> Tensor:
    """[rows, 2] for x [rows, width] with contiguous rows: what is subtracted from each row's entries, one after the other."""
    rows, width = x.shape
    levels = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    if rows:
        block = min(_BLOCK, max(16, triton.next_power_of_2(width)))
        columns = torch.empty(rows, block, dtype=torch.float32, device=x.device)
        options = {"BLOCK": block, "num_warps": 8 if block > 1024 else 4}
        strides = x.stride(0), _row_of(temperature)
        _sum_columns[(rows,)](x, temperature, levels, columns, width, *strides, DIVIDE=divides, **options)
        _add_columns[(rows,)](columns, levels, **options)
    return levels


def _row_of(temperature: Tensor) -> int:
    """Return the distance between the temperatures of two rows; 0 if there is one for all."""
    return 0 if len(temperature) == 1 else temperature.stride(0)


def _grid(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], triton.cdiv(x.shape[-1], _BLOCK)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            levels = _levels(x.view(-1, x.shape[-1]), x, False)  # of the temperatures no number is used
            _subtract[_grid(x)](x, levels, out, x.shape[-1], BLOCK=_BLOCK, num_warps=8)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return (torch.ops.aten._log_softmax_backward_data(grads[0], out, -1, out.dtype),)


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, temperature: Tensor, divides: bool) -> Tensor:
        x, tokens = x if x.stride(1) == 1 else x.contiguous(), tokens.contiguous()
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        levels = _levels(x, temperature, divides)
        if len(x):
            strides = x.stride(0), _row_of(temperature)
            _pick[(len(x),)](x, temperature, levels, tokens, out, *strides, DIVIDE=divides, num_warps=1)
        ctx.save_for_backward(x, levels, tokens, temperature)
        ctx.divides = divides
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, levels, tokens, temperature = ctx.saved_tensors
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            given, sizes = (grads[0].contiguous(), x, temperature, levels, tokens, out), (x.shape[1], x.stride(0))
            options = {"BLOCK": _BLOCK, "DIVIDE": ctx.divides, "num_warps": 8}
            _pick_backward[_grid(x)](*given, *sizes, _row_of(temperature), **options)
        return out, None, None, None
