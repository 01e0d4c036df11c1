"""Rotary embedding (Su et al. 2021) of queries and keys in one launch, and its gradient."""

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
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, out, heads, x_head, x_row, out_head, out_row, row, c1, c2, s1, s2,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):
    kind = out.dtype.element_ty
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    for start in range(0, heads, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)[:, None]
        real = (head < heads) & (dim < HALF)
        source, target = x + head * x_head + row * x_row + dim, out + head * out_head + row * out_row + dim
        a = tl.load(source, mask=real, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        tl.store(target, (a * c1).to(kind).to(tl.float32) - (b * s1).to(kind).to(tl.float32), mask=real)
        tl.store(target + HALF, (b * c2).to(kind).to(tl.float32) + (a * s2).to(kind).to(tl.float32), mask=real)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    query, key, cosine, sine, query_out, key_out, query_heads, key_heads,
    query_head, query_row, query_out_head, query_out_row, key_head, key_row, key_out_head, key_out_row,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BACKWARD: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_HALF)[None, :]
    at = row * HALF * 2 + dim
    c1 = tl.load(cosine + at, mask=dim < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cosine + at + HALF, mask=dim < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sine + at, mask=dim < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sine + at + HALF, mask=dim < HALF, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed rotation
        s1, s2 = -s2, -s1
    if tl.program_id(1) == 0:
        _rotate_heads(
            query, query_out, query_heads, query_head, query_row, query_out_head, query_out_row, row, c1, c2, s1, s2,
            HALF, BLOCK_HEADS, BLOCK_HALF,
        )
    else:
        _rotate_heads(
            key, key_out, key_heads, key_head, key_row, key_out_head, key_out_row, row, c1, c2, s1, s2,
            HALF, BLOCK_HEADS, BLOCK_HALF,
        )

# fmt: on


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """``x * cosine + (-x2 | x1) * sine`` of both, x1 and x2 the halves of x.

    Args:
        query: [1, heads, rows, dim].
        key: [1, key heads, rows, dim].
        cosine: [1, rows, dim].
        sine: likewise.

    Returns:
        Both with their shapes and layouts.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        out: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cosine, sine)
        return out
    return _rotate_pairs(query, key, cosine, sine, False)


def _rotate_pairs(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    outs = torch.empty_like(query), torch.empty_like(key)
    _, heads, rows, dim = query.shape
    strides = [x.stride(d) for pair in ((query, outs[0]), (key, outs[1])) for x in pair for d in (1, 2)]
    wide = next_power_of_2(dim // 2)
    block = min(next_power_of_2(max(heads, key.shape[1])), max(1, 2048 // wide))
    options = {"HALF": dim // 2, "BLOCK_HEADS": block, "BLOCK_HALF": wide, "BACKWARD": backward, **overlap(query)}
    if rows:
        tables = cosine.contiguous(), sine.contiguous()
        _rotate[rows, 2](query, key, *tables, *outs, heads, key.shape[1], *strides, **options)
    return outs


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        return _rotate_pairs(query, key, cosine, sine, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        query, key = grads
        return *_rotate_pairs(query, key, cosine, sine, True), None, None
