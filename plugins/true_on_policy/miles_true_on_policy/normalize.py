"""Log-softmax of logits on a GPU with one program per row, whatever the vocabulary.

PyTorch reads a row in pieces that depend on the alignment of its first entry, and so on the row's number where the vocabulary is not a multiple
of 4.

One kernel computes the level and the log of the sum of a row. The log-probability of an entry is the entry minus both, whether all entries are
wanted or one per row: subtractions have one result, so both ways have the same bits. With one per row, neither the normalised rows nor the
gradient of a gather are written to memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Entries of a row that a program reads at once.
_BLOCK = 4096


@triton.jit
def _normalize(x, levels, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source = x + row * width
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        entry = tl.load(source + first + column, mask=first + column < width, other=-float("inf"))
        now = tl.where(entry > highest, entry, highest)  # never NaN
        shift = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp(highest - shift) + tl.exp(entry - shift)  # NaN where the entry is
        highest = now
    top = tl.max(highest, 0)
    level = tl.where(top == -float("inf"), 0.0, top)
    tl.store(levels + row * 2, level)
    tl.store(levels + row * 2 + 1, tl.log(tl.sum(total * tl.exp(highest - level), 0)))


@triton.jit
def _subtract(x, levels, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    level, log_total = tl.load(levels + row * 2), tl.load(levels + row * 2 + 1)
    entry = tl.load(x + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, entry - level - log_total, mask=column < width)


@triton.jit
def _pick(x, levels, tokens, out, width):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(x + row * width + tl.load(tokens + row))
    tl.store(out + row, entry - tl.load(levels + row * 2) - tl.load(levels + row * 2 + 1))


# fmt: off
@triton.jit
def _pick_backward(  # type: ignore[no-untyped-def]
    grad, x, levels, tokens, out, width, BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    level, log_total, given = tl.load(levels + row * 2), tl.load(levels + row * 2 + 1), tl.load(grad + row)
    entry = tl.load(x + row * width + column, mask=column < width, other=0.0)
    chosen = tl.where(column == tl.load(tokens + row), 1.0, 0.0)
    tl.store(out + row * width + column, given * (chosen - tl.exp(entry - level - log_total)), mask=column < width)

# fmt: on


def log_softmax(x: Tensor) -> Tensor:
    """Normalise x [..., width] FP32 over the last dimension; returns [..., width] FP32."""
    out: Tensor = _LogSoftmax.apply(x)
    return out


def pick_log_softmax(x: Tensor, tokens: Tensor) -> Tensor:
    """Return [rows] FP32: ``log_softmax`` of x [rows, width] FP32 at ``tokens`` [rows], with the same bits."""
    out: Tensor = _Picked.apply(x, tokens)
    return out


def _levels(x: Tensor) -> Tensor:
    """[..., 2] for contiguous x [..., width]: what is subtracted from each row's entries, one after the other."""
    levels = x.new_empty(*x.shape[:-1], 2)
    if x.numel():
        block = min(_BLOCK, max(16, triton.next_power_of_2(x.shape[-1])))
        _normalize[(x.numel() // x.shape[-1],)](x, levels, x.shape[-1], BLOCK=block, num_warps=8 if block > 1024 else 4)
    return levels


def _grid(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], triton.cdiv(x.shape[-1], _BLOCK)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, levels = torch.empty_like(x), _levels(x)
        if x.numel():
            _subtract[_grid(x)](x, levels, out, x.shape[-1], BLOCK=_BLOCK, num_warps=8)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return (torch.ops.aten._log_softmax_backward_data(grads[0], out, -1, out.dtype),)


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        x, tokens = x.contiguous(), tokens.contiguous()
        out, levels = x.new_empty(len(x)), _levels(x)
        if len(x):
            _pick[(len(x),)](x, levels, tokens, out, x.shape[1], num_warps=1)
        ctx.save_for_backward(x, levels, tokens)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, levels, tokens = ctx.saved_tensors
        out = torch.empty_like(x)
        if len(x):
            grad = grads[0].contiguous()
            _pick_backward[_grid(x)](grad, x, levels, tokens, out, x.shape[1], BLOCK=_BLOCK, num_warps=8)
        return out, None
