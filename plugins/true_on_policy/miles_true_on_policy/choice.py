"""Selects the largest entries of each row on a GPU, with one program per row; equal entries are in index order, as in a stable sort. A
stable sort needs several launches and also sorts entries that a router drops. A router's rows are short, so one launch can search for the
largest entry ``k`` times. The entries are gathered, so that autograd computes their gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Most entries of a row, and most that are chosen; others are sorted.
MOST_ENTRIES, MOST_CHOSEN = 1024, 16


# fmt: off
@triton.jit
def _choose(x, index, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    entry = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    free = column < width
    for choice in range(K):
        largest = tl.max(tl.where(free, entry, -float("inf")), 0)
        found = tl.min(tl.where(free & (entry == largest), column, BLOCK), 0)
        first_free = tl.min(tl.where(free, column, BLOCK), 0)
        found = tl.where(found == BLOCK, first_free, found)  # NaN is equal to nothing
        tl.store(index + row * K + choice, found.to(tl.int64))
        free = free & (column != found)

# fmt: on


def can_choose(x: Tensor, k: int) -> bool:
    """Whether ``largest_entries`` takes these."""
    return k <= MOST_CHOSEN and k <= x.shape[-1] <= MOST_ENTRIES and x.is_floating_point() and x.element_size() <= 4


def largest_entries(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest entries of x [..., width] in descending order, [..., k], and their places, int64."""
    rows = x.detach().contiguous().view(-1, x.shape[-1])
    index = torch.empty(*x.shape[:-1], k, dtype=torch.int64, device=x.device)
    block = max(16, triton.next_power_of_2(x.shape[-1]))
    if index.numel():
        _choose[(len(rows),)](rows, index, x.shape[-1], K=k, BLOCK=block, num_warps=1)
    return x.gather(-1, index), index
