"""Uses PyTorch's library for products on a GPU if their result is bit-identical to that of the plugin's kernel.

cuBLAS is faster than ``kernels``, but it chooses an algorithm by the shape, and some of them divide the inner dimension. For a fixed shape it always
chooses the same one. A product is therefore divided into pieces of ``SIZES`` rows, and each size is compared with the kernel once for each
weight shape, when the model is built (``compare``). A size at which any entry differs is not used, and the kernel computes products of shapes
that were not compared. Every result is therefore identical to the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_true_on_policy.kernels import compute_product

#: Rows of a piece.
SIZES = (16, 32, 48, *range(64, 513, 64), *range(1024, 16385, 512))
#: Rows by which a piece may exceed a product.
_PADDED = 64
#: Most pieces of a product. The kernel is as fast as many small ones.
_PIECES = 16
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
    x = torch.randn(max(sizes, default=0) + 1, inner, generator=generator, device=device).to(dtype)
    expected = compute_product(x[None], weight.t()[None])[0]
    for size in sizes:
        # a piece may begin at any row, so its memory may be aligned to the size of a row only
        parts = (slice(first, first + size) for first in (0, 1))
        found[size] = all(torch.equal(torch.mm(x[part], weight.t()), expected[part]) for part in parts)
    _plan.cache_clear()
    return found


def multiply_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [rows, inner] by weight^T, weight [columns, inner]; returns [rows, columns] with the bits of ``kernels.product``."""
    out: Tensor = _Pieces.apply(x, weight)
    return out


def divide(rows: int, sizes: Sequence[int] = SIZES) -> tuple[tuple[int, int], ...]:
    """Divide rows into pieces: (first row, size) of each.

    One piece of slightly more rows, which are padded, if there is such a size: in decoding, every piece reads the weight once. Otherwise the last
    piece overlaps the one before it, whose results it repeats.
    """
    above = min((size for size in sizes if size >= rows), default=0)
    fitting = [size for size in sizes if size <= rows]
    if above and (above - rows < _PADDED or not fitting):
        return ((0, above),)
    size = max(fitting)
    pieces = [(first, size) for first in range(0, rows - size + 1, size)]
    left = rows % size
    if left:
        last = min(size for size in fitting if size >= left)
        pieces.append((rows - last, last))
    return tuple(pieces)


@cache
def _plan(rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> tuple[tuple[int, int], ...]:
    """Return the pieces that the library computes; nothing if the kernel computes the product."""
    equal = _equal.get((columns, inner, dtype, device), {})
    sizes = [size for size, same in equal.items() if same]
    if not rows or not sizes:
        return ()
    pieces = divide(rows, sizes)
    return pieces if len(pieces) <= _PIECES and pieces[0][1] - rows < _PADDED else ()


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        whole = x.dtype == weight.dtype and weight.is_contiguous()
        plan = _plan(len(x), *weight.shape, weight.dtype, weight.device) if whole else ()
        if not plan:
            return compute_product(x[None], weight.t()[None])[0]
        x, transposed = x.contiguous(), weight.t()
        size = plan[0][1]
        with torch._C.DisableTorchFunction():  # mode.Invariant replaces torch.mm
            if size > len(x):
                return torch.mm(pad(x, (0, 0, 0, size - len(x))), transposed)[: len(x)]
            if len(plan) == 1:
                return torch.mm(x, transposed)
            out = x.new_empty(len(x), len(weight))
            for first, size in plan:
                torch.mm(x[first : first + size], transposed, out=out[first : first + size])
            return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return grads[0] @ weight if left else None, grads[0].t() @ x if right else None
