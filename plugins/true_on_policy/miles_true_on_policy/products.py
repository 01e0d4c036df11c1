"""Matrix products in which a row's result does not depend on the other rows, on their number, or on the number of threads.

Libraries choose how they add the terms of a product by its shape: with few rows, or when a thread's share has few rows, FP32 products add in
another order (MKL and oneDNN, 1 to 11 rows), and BF16 products do for a single row. Products of whole tiles of ``TILE`` rows do not
differ. Rows are therefore padded with zeros to whole tiles. No library guarantees it, so ``check_tiles`` tries each shape
of a model on the machine that runs it.

On a GPU the products and sums are those of ``kernels``, whose order is fixed by construction; PyTorch's sums over the last dimension depend on
the number of rows there, and on a CPU they do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

#: Rows of a tile.
TILE = 32
#: Numbers of tiles that ``check_tiles`` compares with a single one: on a GPU some for each tile of ``kernels``.
_TRIED = {"cpu": (2, 5), "cuda": (3, 17, 33)}


def uses_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels compute with ``x``: on a GPU."""
    return x.is_cuda


def pad_tiles(x: Tensor) -> Tensor:
    """Pad x [..., rows, inner] with zeros to whole tiles of rows."""
    more = -x.shape[-2] % TILE
    return pad(x, (0, 0, 0, more)) if more else x


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias.

    Args:
        x: [..., inner].
        weight: [columns, inner].
        bias: [columns].

    Returns:
        [..., columns].
    """
    flat = x.reshape(-1, x.shape[-1])
    if uses_kernels(x):
        out = _multiply_tiles(flat, weight, bias)
    else:
        out = _multiply_tiles(pad_tiles(flat).contiguous(), weight, bias)[: len(flat)]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _multiply_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not uses_kernels(x):
        return linear(x, weight, bias)
    from miles_true_on_policy.library import multiply_pieces

    out = multiply_pieces(x, weight)
    return out if bias is None else out + bias


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the matrix product a b as ``torch.matmul`` does.

    Args:
        a: [..., rows, inner].
        b: [inner, columns] or [..., inner, columns].
        out: where to store the result; a new tensor by default.

    Returns:
        [..., rows, columns].
    """
    if a.dim() < 2 or b.dim() < 2:
        result = torch.matmul(a, b)
    elif b.dim() == 2:
        result = multiply_rows(a, b.t())
    elif uses_kernels(a):
        from miles_true_on_policy.kernels import product

        shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left, right = (x.expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
        result = product(left, right).view(*shape, a.shape[-2], b.shape[-1])
    else:
        result = torch.matmul(pad_tiles(a), b)[..., : a.shape[-2], :].contiguous()
    return result if out is None else out.copy_(result)


def add_product(x: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1) -> Tensor:
    """Add alpha a b to x in place, as ``torch.Tensor.addmm_`` and ``torch.Tensor.baddbmm_`` do, with the same bits for one batch as without.

    Args:
        x: [..., rows, columns].
        a: [..., rows, inner].
        b: [inner, columns] or [batch, inner, columns].
    """
    return x.add_(multiply(a, b[0] if b.dim() == 3 and len(b) == 1 else b), alpha=alpha)


def multiply_groups(x: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: None = None) -> Tensor:
    """Multiply sorted rows by the matrix of their group, as ``torch.nn.functional.grouped_mm`` does.

    Args:
        x: [rows, inner], sorted by group.
        matrices: [groups, inner, columns].
        offs: [groups] end of each group's rows.
        bias, out_dtype: not supported.

    Returns:
        [rows, columns].
    """
    if uses_kernels(x) and x.dtype == matrices.dtype:
        from miles_true_on_policy.kernels import grouped_product

        return grouped_product(x, matrices, offs)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    pairs = zip(x.split(sizes), matrices.unbind(0), strict=True)
    found = [multiply(rows, matrix) for rows, matrix in pairs if len(rows)]
    return torch.cat(found) if found else x.new_zeros(0, matrices.shape[2])


def sum_rows(x: Tensor, dim: int = -1) -> Tensor:
    """Add the entries of x along ``dim``, which disappears."""
    if not uses_kernels(x):
        return x.sum(dim)
    from miles_true_on_policy.kernels import sum_last

    return sum_last(x.movedim(dim, -1)).to(x.dtype)


@torch.no_grad()
def check_tiles(columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row of a product of this shape depends neither on its place in a tile nor on the number of tiles or threads."""
    if device.type == "cuda":
        from miles_true_on_policy.library import compare

        compare(columns, inner, dtype, device)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, inner, generator=generator).to(device, dtype)
    x = torch.randn(TILE, inner, generator=generator).to(device, dtype)
    threads = torch.get_num_threads()
    expected = _multiply_tiles(x, weight)
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            rolled = _multiply_tiles(x.roll(5, 0).contiguous(), weight).roll(-5, 0)
            if not torch.equal(rolled, expected):
                return False
            for tiles in _TRIED[device.type]:
                if not torch.equal(_multiply_tiles(x.repeat(tiles, 1), weight), expected.repeat(tiles, 1)):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True
