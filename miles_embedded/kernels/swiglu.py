"""The gate of an MLP (Shazeer 2020), ``silu(gate) * up``, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _forward(gate, up, out, gate_row, up_row, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    a = tl.load(gate + row * gate_row + column, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, mask=real, other=0.0).to(tl.float32)
    active = (a / (1.0 + tl.exp(-a))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, active * b, mask=real)


# fmt: off
@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gate, up, grad, grad_gate, grad_up, gate_row, up_row, width, BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, at = column < width, row * width + column
    a = tl.load(gate + row * gate_row + column, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + column, mask=real, other=0.0).to(tl.float32)
    given = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
    open = 1.0 / (1.0 + tl.exp(-a))
    tl.store(grad_up + at, given * a * open, mask=real)
    tl.store(grad_gate + at, given * b * open * (1.0 + a * (1.0 - open)), mask=real)

# fmt: on


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, the first factor rounded to the type of ``gate``.

    Args:
        gate: [..., width]; may be a part of the columns of a matrix.
        up: likewise, in the same type.

    Returns:
        [..., width], contiguous.
    """
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = _SwiGLU.apply(gate, up)
        return out
    return _gate(gate, up)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    a, b = _rows(gate), _rows(up)
    if len(a):
        _forward[_grid(a)](a, b, out, a.stride(0), b.stride(0), a.shape[1], BLOCK=_BLOCK)
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width] whose rows are contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.shape[1], _BLOCK)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        a, b = _rows(gate), _rows(up)
        grad_gate, grad_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        if len(a):
            strides = (a.stride(0), b.stride(0), a.shape[1])
            _backward[_grid(a)](a, b, grads[0].contiguous(), grad_gate, grad_up, *strides, BLOCK=_BLOCK)
        return grad_gate, grad_up
