"""Log-probabilities of given tokens from logits in the model's type, in one pass, and their gradient. No matrix of [rows, vocabulary] in FP32 is
stored: with a vocabulary of 32,000 or more such matrices take torch longer than the layer norms of a whole model."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2

#: Largest block of a row.
_BLOCK = 4096


# fmt: off
@triton.jit
def _load(logits, at, real, temperature, DIVIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(logits + at, mask=real, other=-float("inf")).to(tl.float32)
    if DIVIDE:
        value = tl.div_rn(value, tl.full(value.shape, 1.0, tl.float32) * temperature)
    return value


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    logits, tokens, out, highest, total, row_stride, width, temperature, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source, column = logits + row * row_stride, tl.arange(0, BLOCK)
    top = tl.full([1], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + column
        value = _load(source, at, at < width, temperature, DIVIDE)
        before, top = top, tl.maximum(top, tl.max(value, 0))
        shift = tl.where(top == -float("inf"), 0.0, top)
        sums = sums * tl.exp(before - shift) + tl.exp(value - shift)
    whole = tl.log(tl.sum(sums, 0))
    index = tl.arange(0, 1)
    chosen = _load(source, tl.load(tokens + row) + index, index < 1, temperature, DIVIDE)
    tl.store(out + row + index, chosen - top - whole)
    tl.store(highest + row + index, top)
    tl.store(total + row + index, whole + tl.zeros([1], tl.float32))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits, tokens, grad, highest, total, grad_logits, row_stride, width, temperature, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    value = _load(logits + row * row_stride, at, real, temperature, DIVIDE)
    share = tl.exp(value - tl.load(highest + row) - tl.load(total + row))
    result = tl.load(grad + row) * (tl.where(at == tl.load(tokens + row), 1.0, 0.0) - share)
    if DIVIDE:
        result = tl.div_rn(result, tl.full(result.shape, 1.0, tl.float32) * temperature)
    tl.store(grad_logits + row * width + at, result, mask=real)

# fmt: on


class LogProbs:
    """``log_softmax(logits / temperature)`` of one token per row, computed in FP32."""

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """See ``Operations.log_probs``; torch computes it in float64."""
        if logits.dtype == torch.float64:
            return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return self.of_logits(logits, tokens, 1.0)

    def of_logits(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Compute the log-probabilities from logits that are not yet converted or divided.

        Args:
            logits: [rows, vocabulary] of any type up to FP32.
            tokens: [rows] int64.
            temperature: divides the logits.

        Returns:
            [rows] float32.
        """
        out: Tensor = _LogProbs.apply(logits, tokens, temperature)
        return out


log_probs = LogProbs()


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens = tokens.contiguous()
        rows, width = logits.shape
        out, highest, total = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
        ctx.options = {"BLOCK": min(next_power_of_2(width), _BLOCK), "DIVIDE": temperature != 1.0}
        ctx.temperature = temperature
        if rows:
            sizes = logits.stride(0), width, temperature
            _forward[(rows,)](logits, tokens, out, highest, total, *sizes, **ctx.options, num_warps=8)
        ctx.save_for_backward(logits, tokens, highest, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, highest, total = ctx.saved_tensors
        rows, width = logits.shape
        grad = torch.empty((rows, width), dtype=logits.dtype, device=logits.device)
        if rows:
            grid, sizes = (rows, cdiv(width, ctx.options["BLOCK"])), (logits.stride(0), width, ctx.temperature)
            given = grads[0].contiguous()
            _backward[grid](logits, tokens, given, highest, total, grad, *sizes, **ctx.options, num_warps=8)
        return grad, None, None
