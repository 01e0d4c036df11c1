"""Rotary embedding (Su et al. 2021) of queries and keys, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import next_power_of_2
from miles_embedded.kernels.overlap import overlap, release, wait


# fmt: off
@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, cosine, sine, out, heads, x_head, x_row, out_head, out_row,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BACKWARD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_HALF)
    known = dim < HALF
    kind = out.dtype.element_ty
    at = row * HALF * 2 + dim
    c1 = tl.load(cosine + at, mask=known, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cosine + at + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sine + at, mask=known, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sine + at + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:  # the transposed rotation
        s1, s2 = -s2, -s1
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)[:, None]
        real = (head < heads) & known[None, :]
        source, target = x + head * x_head + row * x_row + dim[None, :], out + head * out_head + row * out_row + dim[None, :]
        a = tl.load(source, mask=real, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        tl.store(target, (a * c1).to(kind).to(tl.float32) - (b * s1).to(kind).to(tl.float32), mask=real)
        tl.store(target + HALF, (b * c2).to(kind).to(tl.float32) + (a * s2).to(kind).to(tl.float32), mask=real)

# fmt: on


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``x * cosine + (-x2 | x1) * sine``, x1 and x2 the halves of x.

    Args:
        x: [1, heads, rows, dim].
        cosine: [1, rows, dim].
        sine: likewise.

    Returns:
        [1, heads, rows, dim] with the layout of ``x``.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Rotation.apply(x, cosine, sine)
        return out
    return _rotate_pairs(x, cosine, sine, False)


def _rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor, backward: bool) -> Tensor:
    if x.stride(3) != 1:
        x = x.contiguous()
    out = torch.empty_like(x)
    _, heads, rows, dim = x.shape
    strides = (x.stride(1), x.stride(2), out.stride(1), out.stride(2))
    wide = next_power_of_2(dim // 2)
    block = min(next_power_of_2(heads), max(1, 2048 // wide))
    blocks = {"HALF": dim // 2, "BLOCK_HEADS": block, "BLOCK_HALF": wide, "BACKWARD": backward}
    if rows:
        _rotate[(rows,)](x, cosine.contiguous(), sine.contiguous(), out, heads, *strides, **blocks, **overlap(x))
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate_pairs(x, cosine, sine, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotate_pairs(grads[0], cosine, sine, True), None, None
