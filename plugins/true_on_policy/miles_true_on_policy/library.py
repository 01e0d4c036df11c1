"""Uses PyTorch's library for products on a GPU if their result is bit-identical to that of the plugin's kernel.

cuBLAS is faster than ``kernels``, but it chooses an algorithm by the shape, and some of them divide the inner dimension. For a fixed shape it always
chooses the same one. A product is therefore divided into pieces of ``SIZES`` rows, and each size is compared with the kernel once for each
weight shape, when the model is built (``compare``). Sizes at which any entry differs, and shapes that were not compared, are computed by the
kernel. Every result is therefore identical to the kernel's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_true_on_policy.kernels import compute_product

#: Rows of a piece. Below ``_FULL``, the last piece is padded to the next size.
SIZES = (16, 32, 48, *range(64, 513, 64), *range(1024, 16385, 512))
_FULL = 512
#: Largest number of entries of a product that is compared.
_MOST = 1 << 28
#: (columns, inner, dtype, device) -> compared size -> whether its product has the kernel's bits.
_equal: dict[tuple[int, int, torch.dtype, torch.device], dict[int, bool]] = {}


@torch.no_grad()
def compare(columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> dict[int, bool]:
    """Find at which sizes the library's product with a weight [columns, inner] has the kernel's bits."""
    key = columns, inner, dtype, device
    if key in _equal:
        return _equal[key]
    found = _equal[key] = {}
    if dtype not in (torch.bfloat16, torch.float16) or columns % 8 or inner % 8:
        return (
            found  # the library's choice also depends on the alignment of rows whose size is not a multiple of 16 bytes
        )
    sizes = [size for size in SIZES if size * columns <= _MOST]
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(columns, inner, generator=generator, device=device).to(dtype)
    x = torch.randn(max(sizes, default=0), inner, generator=generator, device=device).to(dtype)
    for size in sizes:
        expected = compute_product(x[None, :size], weight.t()[None])[0]
        found[size] = torch.equal(torch.mm(x[:size], weight.t()), expected)
    _plan.cache_clear()
    return found


def multiply_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [rows, inner] by weight^T, weight [columns, inner]; returns [rows, columns] with the bits of ``kernels.product``."""
    out: Tensor = _Pieces.apply(x, weight)
    return out


@cache
def divide(rows: int, largest: int = SIZES[-1]) -> tuple[tuple[int, int], ...]:
    """Divide rows into pieces of at most ``largest``: (rows, size) of each, the size at least its rows."""
    pieces, sizes = [], [size for size in SIZES if size <= largest]
    while rows >= _FULL:
        size = max(size for size in sizes if size <= rows)
        pieces.append((size, size))
        rows -= size
    if rows:
        pieces.append((rows, min(size for size in sizes if size >= rows)))
    return tuple(pieces)


@cache
def _plan(
    rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, int, int, bool], ...]:
    """First row, rows, size, and whether the library computes it, of each piece; nothing if the kernel computes the whole product."""
    equal = _equal.get((columns, inner, dtype, device), {})
    if not rows or _FULL not in equal or not any(equal.values()):
        return ()
    plan, first = [], 0
    for count, size in divide(rows, max(equal)):
        plan.append((first, count, size, equal[size]))
        first += count
    return tuple(plan)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        whole = x.dtype == weight.dtype and weight.is_contiguous()
        plan = _plan(len(x), *weight.shape, weight.dtype, weight.device) if whole else ()
        if not plan:
            return compute_product(x[None], weight.t()[None])[0]
        x, transposed = x.contiguous(), weight.t()
        _, count, size, equal = plan[0]
        if len(plan) == 1 and equal and count == size:  # not torch.mm, which mode.Invariant replaces
            return torch.ops.aten.mm(x, transposed)
        out = x.new_empty(len(x), len(weight))
        for first, count, size, equal in plan:
            part, target = x.narrow(0, first, count), out.narrow(0, first, count)
            if not equal:
                target.copy_(compute_product(part[None], transposed[None])[0])
            elif count < size:
                target.copy_(torch.ops.aten.mm(pad(part, (0, 0, 0, size - count)), transposed)[:count])
            else:
                torch.ops.aten.mm.out(part, transposed, out=target)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return grads[0] @ weight if left else None, grads[0].t() @ x if right else None
