"""Root-mean-square norm (Zhang and Sennrich 2019), also of a sum of two tensors, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2
from miles_embedded.kernels.epilogue import RowEpilogue, end_of
from miles_embedded.kernels.overlap import overlap, release, wait

#: Elements of a program's block; for a backward pass, whose programs each sum a part of the weight's gradient, also their number.
_BLOCK, _BACKWARD_BLOCK, _PROGRAMS = 1024, 2048, 1056
#: Elements in which the distance between runs of rows is counted, so that the kernel knows how far its loads are aligned.
_UNIT = 16


# fmt: off
@triton.jit
def _store_norm(  # type: ignore[no-untyped-def]
    value, weight, out, row, dim, real, eps, padded, first, second, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, STORE: tl.constexpr,
):
    """Store the norm of rows ``value`` [R, C] FP32."""
    factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)  # before the sum, which waits
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    normal = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    result = (normal * factor).to(out.dtype.element_ty)
    tl.store(out + row * DIM + dim, result, mask=real)
    if STORE is not None:
        top = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
        STORE(tl.where(real, result.to(tl.float32), 0.0), top, 0, DIM, padded, first, second)


# One compiled kernel for all numbers of rows and strides: the order in which a row is added does not depend on them.
@triton.jit(do_not_specialize=["rows", "inner", "outer_stride", "padded"])
def _forward(  # type: ignore[no-untyped-def]
    x, weight, out, rows, eps, inner, outer_stride, padded, first, second,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, UNIT: tl.constexpr, STORE: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    real = (row < rows) & (dim < DIM)
    start = row // inner * outer_stride * UNIT + row % inner * DIM
    value = tl.load(x + start + dim, mask=real, other=0.0).to(tl.float32)
    _store_norm(value, weight, out, row, dim, real, eps, padded, first, second, DIM, BLOCK_ROWS, STORE)


@triton.jit(do_not_specialize=["rows", "padded"])
def _add_forward(  # type: ignore[no-untyped-def]
    x, other, weight, total, out, rows, eps, padded, first, second,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, STORE: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    real, at = (row < rows) & (dim < DIM), row * DIM + dim
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32) + tl.load(other + at, mask=real, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=real)
    _store_norm(rounded.to(tl.float32), weight, out, row, dim, real, eps, padded, first, second, DIM, BLOCK_ROWS, STORE)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x, weight, grad, more, grad_x, grad_weight, rows, eps,
    DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, ADD: tl.constexpr,
):
    program, dim = tl.program_id(0), tl.arange(0, BLOCK_DIM)[None, :]
    factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for block in range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]).to(tl.int64)
        real = (row < rows) & (dim < DIM)
        value = tl.load(x + row * DIM + dim, mask=real, other=0.0).to(tl.float32)
        given = tl.load(grad + row * DIM + dim, mask=real, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
        normal = value * scale
        inner = given * factor
        share = tl.sum(inner * normal, 1)[:, None] / DIM
        result = scale * (inner - normal * share)
        if ADD:
            result += tl.load(more + row * DIM + dim, mask=real, other=0.0).to(tl.float32)
        tl.store(grad_x + row * DIM + dim, result, mask=real)
        total += given * normal
    tl.store(grad_weight + program.to(tl.int64) * DIM + dim, tl.sum(total, 0)[None, :], mask=dim < DIM)

# fmt: on


class RmsNorm:
    """``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension, the quotient rounded to the type of ``x`` as in Transformers."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, epilogue: RowEpilogue | None = None) -> Tensor:
        """Compute the norm.

        Args:
            x: [..., dim].
            weight: [dim] in the same type.
            eps: see above.
            epilogue: stores the result in a second form, without gradient.

        Returns:
            [..., dim].
        """
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            out: Tensor = _Norm.apply(x, weight, eps)
            return out
        return _normalize(x, weight, eps, epilogue)

    def of_sum(
        self, x: Tensor, other: Tensor, weight: Tensor, eps: float, epilogue: RowEpilogue | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``x + other`` and its norm, [..., dim] both, from one launch; the epilogue has no gradient."""
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, other, weight)):
            pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, other, weight, eps)
            return pair
        return _add_and_normalize(x, other, weight, eps, epilogue)


rms_norm = RmsNorm()


def _add_and_normalize(
    x: Tensor, other: Tensor, weight: Tensor, eps: float, epilogue: RowEpilogue | None = None
) -> tuple[Tensor, Tensor]:
    x, other, (rows, blocks) = x.contiguous(), other.contiguous(), _blocks(x)
    total, out = torch.empty_like(x), torch.empty_like(x)
    padded, store, memory = end_of(epilogue, rows, out)
    if rows:
        grid, options = _launch_options(x, padded, blocks)
        _add_forward[grid](x, other, weight, total, out, rows, eps, padded, *memory, **options, STORE=store)
    if epilogue is not None:
        epilogue.finish(out)
    return total, out


def _normalize(x: Tensor, weight: Tensor, eps: float, epilogue: RowEpilogue | None = None) -> Tensor:
    layout, (rows, blocks) = _layout(x), _blocks(x)
    if layout is None:
        x, layout = x.contiguous(), (rows, 0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded, store, memory = end_of(epilogue, rows, out)
    if rows:
        grid, options = _launch_options(x, padded, blocks)
        _forward[grid](x, weight, out, rows, eps, *layout, padded, *memory, **options, UNIT=_UNIT, STORE=store)
    if epilogue is not None:
        epilogue.finish(out)
    return out


def _launch_options(x: Tensor, rows: int, blocks: dict[str, Any]) -> tuple[tuple[int], dict[str, Any]]:
    return (cdiv(rows, blocks["BLOCK_ROWS"]),), {**blocks, **overlap(x), "num_warps": _warps(blocks)}


def _warps(blocks: dict[str, Any]) -> int:
    warps: int = min(16, max(4, blocks["BLOCK_DIM"] // 256))
    return warps


def _layout(x: Tensor) -> tuple[int, int] | None:
    """Return the number of rows in a run, whose rows follow each other, and the distance between two runs in units of ``_UNIT`` elements; None
    if ``x`` has no such layout. Heads that are a part of the columns of a matrix form such runs."""
    dim = x.shape[-1]
    if x.is_contiguous():
        return max(1, x.numel() // dim), 0
    if x.dim() < 3 or x.stride(-1) != 1 or x.stride(-2) != dim or any(size != 1 for size in x.shape[:-3]):
        return None
    outer, rest = divmod(x.stride(-3), _UNIT)
    return None if rest else (x.shape[-2], outer)


def _blocks(x: Tensor, block: int = _BLOCK) -> tuple[int, dict[str, Any]]:
    dim = x.shape[-1]
    wide = next_power_of_2(dim)
    return x.numel() // dim, {"DIM": dim, "BLOCK_ROWS": max(1, block // wide), "BLOCK_DIM": wide}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normalize(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_differentiate(x, weight, ctx.eps, grads[0]), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out = _add_and_normalize(x, other, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_x, grad_weight = _differentiate(total, weight, ctx.eps, grads[1], grads[0])
        return grad_x, grad_x, grad_weight, None


def _differentiate(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, plus ``more``, and of the weight, given that of the norm of x."""
    rows, blocks = _blocks(x, _BACKWARD_BLOCK)
    programs = max(1, min(_PROGRAMS, cdiv(rows, blocks["BLOCK_ROWS"])))
    grad, grad_x = grad.contiguous(), torch.empty_like(x)
    parts = torch.empty(programs, len(weight), dtype=torch.float32, device=x.device)
    added = grad if more is None else more.contiguous()
    options = {**blocks, "ADD": more is not None, "num_warps": _warps(blocks)}
    _backward[(programs,)](x, weight, grad, added, grad_x, parts, rows, eps, **options)
    return grad_x, parts.sum(0).to(weight.dtype)
