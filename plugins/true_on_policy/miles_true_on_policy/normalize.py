"""Log-softmax of logits on a GPU with one program per row, whatever the vocabulary.

PyTorch reads a row in pieces that depend on the alignment of its first entry, and so on the row's number where the vocabulary is no multiple
of 4.
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
def _normalize(x, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    log_total = tl.log(tl.sum(total * tl.exp(highest - level), 0))
    for first in range(0, width, BLOCK):
        real = first + column < width
        entry = tl.load(source + first + column, mask=real, other=0.0)
        tl.store(out + row * width + first + column, entry - level - log_total, mask=real)


def log_softmax(x: Tensor) -> Tensor:
    """Normalise x [..., width] FP32 over the last dimension; returns [..., width] FP32."""
    out: Tensor = _LogSoftmax.apply(x)
    return out


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        if x.numel():
            block = min(_BLOCK, max(16, triton.next_power_of_2(width)))
            _normalize[(x.numel() // width,)](x, out, width, BLOCK=block, num_warps=8 if block > 1024 else 4)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return (torch.ops.aten._log_softmax_backward_data(grads[0], out, -1, out.dtype),)
