"""The gate of an MLP (Shazeer 2020), ``silu(gate) * up``, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv
from miles_embedded.kernels.epilogue import RowEpilogue, end_of
from miles_embedded.kernels.overlap import overlap, release, wait

_BLOCK = 1024


# fmt: off
@triton.jit(do_not_specialize=["rows", "padded"])
def _forward(  # type: ignore[no-untyped-def]
    gate, up, out, gate_row, up_row, width, rows, padded, first, second,
    BLOCK: tl.constexpr, STORE: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)[None, :]  # two dimensions, as STORE takes them
    real = (column < width) & (row < rows)
    a = tl.load(gate + row * gate_row + column, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, mask=real, other=0.0).to(tl.float32)
    active = (a / (1.0 + tl.exp(-a))).to(out.dtype.element_ty).to(tl.float32)
    result = (active * b).to(out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=real)
    if STORE is not None:
        STORE(tl.where(real, result.to(tl.float32), 0.0), row, start, width, padded, first, second)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gate, up, grad, grad_gate, grad_up, gate_row, up_row, grad_row, width, BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, at = column < width, row * grad_row + column
    a = tl.load(gate + row * gate_row + column, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, mask=real, other=0.0).to(tl.float32)
    given = tl.load(grad + row * width + column, mask=real, other=0.0).to(tl.float32)
    open = 1.0 / (1.0 + tl.exp(-a))
    tl.store(grad_up + at, given * a * open, mask=real)
    tl.store(grad_gate + at, given * b * open * (1.0 + a * (1.0 - open)), mask=real)

# fmt: on


def swiglu(gate: Tensor, up: Tensor, epilogue: RowEpilogue | None = None) -> Tensor:
    """``silu(gate) * up``, the first factor rounded to the type of ``gate``.

    Args:
        gate: [..., width]; may be a part of the columns of a matrix.
        up: likewise, in the same type.
        epilogue: stores the result in a second form, without gradient.

    Returns:
        [..., width], contiguous.
    """
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = _SwiGLU.apply(gate, up)
        return out
    return _gate(gate, up, epilogue)


def _gate(gate: Tensor, up: Tensor, epilogue: RowEpilogue | None = None) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    a, b = _rows(gate), _rows(up)
    (rows, width), strides = a.shape, (a.stride(0), b.stride(0))
    padded, store, memory = end_of(epilogue, rows, out)
    if rows:
        grid = (padded, cdiv(width, _BLOCK))
        _forward[grid](a, b, out, *strides, width, rows, padded, *memory, BLOCK=_BLOCK, STORE=store, **overlap(a))
    if epilogue is not None:
        epilogue.finish(out)
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width] whose rows are contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return gate, up


def swiglu_of_halves(x: Tensor) -> Tensor:
    """``swiglu`` of the two halves of x [..., 2 width] -> [..., width]."""
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _HalvesSwiGLU.apply(x)
        return out
    return _gate(*_halves(x))


def _differentiate(gate: Tensor, up: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Write the gradients of gate and up; both have the same row stride."""
    a, b = _rows(gate), _rows(up)
    if len(a):
        strides = (a.stride(0), b.stride(0), grad_gate.stride(-2), a.shape[1])
        _backward[_grid(a)](a, b, grad.contiguous(), grad_gate, grad_up, *strides, BLOCK=_BLOCK)


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), cdiv(x.shape[1], _BLOCK)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        _differentiate(gate, up, grads[0], grad_gate, grad_up)
        return grad_gate, grad_up


class _HalvesSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gate(*_halves(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (gate, up), (grad_gate, grad_up) = x.chunk(2, -1), out.chunk(2, -1)
        _differentiate(gate, up, grads[0], grad_gate, grad_up)
        return out
