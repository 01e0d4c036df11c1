"""The usual router's choice without gradients: the largest of a softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.overlap import overlap, release, wait

#: Most experts of a row's block, and most that are chosen: the kernel looks for the largest as often.
MOST_EXPERTS, MOST_CHOSEN = 1024, 16


# fmt: off
@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, weights, index, experts, K: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, column, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    x = tl.load(logits + row * experts + column, mask=column < experts, other=-float("inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    share = tl.where(column < experts, share / tl.sum(share, 0), -1.0)
    values, chosen, total = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int64), 0.0
    for choice in range(K):
        value = tl.max(share, 0)
        best = tl.min(tl.where(share == value, column, BLOCK - 1), 0)  # of equal ones the first; NaN: any
        values = tl.where(place == choice, value, values)
        chosen = tl.where(place == choice, tl.minimum(best, experts - 1), chosen)
        share = tl.where(column == best, -1.0, share)
        total += value
    if NORMALIZED:
        values = values / total
    tl.store(weights + row * K + place, values, mask=place < K)
    tl.store(index + row * K + place, chosen, mask=place < K)

# fmt: on


def choose(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` experts of each row with the largest softmax, in descending order.

    Args:
        logits: [rows, experts].
        k: how many.
        normalized: their weights add up to one.

    Returns:
        weights [rows, k] in the type of ``logits``, and index [rows, k] int64.
    """
    rows, experts = logits.shape
    weights = logits.new_empty(rows, k)
    index = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    block = {"BLOCK": max(16, triton.next_power_of_2(experts)), "BLOCK_K": triton.next_power_of_2(k)}
    if rows:
        _choose[(rows,)](
            logits.contiguous(),
            weights,
            index,
            experts,
            K=k,
            NORMALIZED=normalized,
            **block,
            **overlap(logits),
            num_warps=1,
        )
    return weights, index


def can_choose(logits: Tensor, k: int) -> bool:
    """Whether ``choose`` takes these."""
    return (
        logits.shape[1] <= MOST_EXPERTS and k <= MOST_CHOSEN and not (torch.is_grad_enabled() and logits.requires_grad)
    )
