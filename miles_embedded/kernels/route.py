"""The standard router, which selects the largest entries of a softmax, and its gradient: one launch forward and one backward.

With ``p = softmax(z)`` of a row's logits and experts ``c_1 ... c_k``, the weights are ``p[c_i]``, or ``p[c_i] / sum_j p[c_j]`` if they are
normalized. Let ``g`` be the gradient of the weights and ``G[e]`` the sum of ``g_i`` over ``c_i = e``. Without normalization the gradient of the
logits is ``p[e] (G[e] - sum_j p[j] G[j])``. With it, let ``q`` be ``p`` times the number of places at which an expert was chosen, divided by
its sum, and ``M`` the mean of ``g_i`` over an expert's places: the gradient is ``q[e] (M[e] - sum_j q[j] M[j])``, which is 0 for all other
experts. The backward pass computes the softmax again, so that nothing but the logits and the experts is kept.

The experts may be given, as in the replay of a rollout. The router's own choice is returned as well.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import next_power_of_2
from miles_embedded.kernels.overlap import overlap, release, wait

#: Most experts of a row's block, and most that are chosen: the kernel looks for the largest as often.
MOST_EXPERTS, MOST_CHOSEN = 1024, 16


# fmt: off
@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, given, weights, index, experts, row_stride, place_stride,
    K: tl.constexpr, NORMALIZED: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, column, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    x = tl.load(logits + row * experts + column, mask=column < experts, other=-float("inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    whole = tl.sum(share, 0)
    share = tl.where(column < experts, share / whole, -1.0)
    values, chosen, total = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int64), 0.0
    if GIVEN:
        for choice in range(K):
            expert = tl.load(given + row * row_stride + choice * place_stride).to(tl.int32)
            value = tl.sum(tl.where(column == expert, share, 0.0), 0)
            values = tl.where(place == choice, value, values)
            total += value
    for choice in range(K):
        value = tl.max(share, 0)
        best = tl.min(tl.where(share == value, column, BLOCK - 1), 0)  # of equal ones the first; NaN: any
        chosen = tl.where(place == choice, tl.minimum(best, experts - 1), chosen)
        share = tl.where(column == best, -1.0, share)
        if not GIVEN:
            values = tl.where(place == choice, value, values)
            total += value
    if NORMALIZED:
        values = values / total
    values = tl.where(whole == whole, values, whole)  # the largest of a row with NaN need not be NaN
    tl.store(weights + row * K + place, values, mask=place < K)
    tl.store(index + row * K + place, chosen, mask=place < K)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits, index, grad, out, experts, row_stride, place_stride,
    K: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(logits + row * experts + column, mask=column < experts, other=-float("inf")).to(tl.float32)
    share = tl.exp(x - tl.max(x, 0))
    share = share / tl.sum(share, 0)
    slope, times = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for choice in range(K):
        expert = tl.load(index + row * row_stride + choice * place_stride).to(tl.int32)
        slope += tl.where(column == expert, tl.load(grad + row * K + choice).to(tl.float32), 0.0)
        times += tl.where(column == expert, 1.0, 0.0)
    if NORMALIZED:
        share = share * times
        share = share / tl.sum(share, 0)
        slope = slope / tl.maximum(times, 1.0)
    tl.store(out + row * experts + column, share * (slope - tl.sum(share * slope, 0)), mask=column < experts)

# fmt: on


def choose(logits: Tensor, k: int, normalized: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The ``k`` experts of each row with the largest softmax, in descending order. Differentiable with respect to ``logits``.

    Args:
        logits: [rows, experts].
        k: how many.
        normalized: their weights add up to one.
        given: [rows, k] of any integer type and strides, experts whose weights are returned instead.

    Returns:
        weights [rows, k] in the type of ``logits``, of the chosen or of the given experts, and index [rows, k] int64 of the chosen ones.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        found: tuple[Tensor, Tensor] = _Choice.apply(logits, k, normalized, given)
        return found
    return _launch(logits.contiguous(), k, normalized, given)


def can_choose(logits: Tensor, k: int) -> bool:
    """Whether ``choose`` takes these."""
    return logits.shape[1] <= MOST_EXPERTS and k <= MOST_CHOSEN


def _launch(logits: Tensor, k: int, normalized: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, experts = logits.shape
    weights = logits.new_empty(rows, k)
    index = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    block = {"BLOCK": _block(experts), "BLOCK_K": next_power_of_2(k)}
    which = index if given is None else given  # the kernel reads only the arguments that are given
    sizes = {"K": k, "NORMALIZED": normalized, "GIVEN": given is not None}
    if rows:
        options = {**sizes, **block, **overlap(logits), "num_warps": 1}
        _choose[(rows,)](logits, which, weights, index, experts, *which.stride(), **options)
    return weights, index


def _block(experts: int) -> int:
    return max(16, next_power_of_2(experts))


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, normalized: bool, given: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        weights, index = _launch(logits, k, normalized, given)
        ctx.save_for_backward(logits, index if given is None else given)
        ctx.normalized = normalized
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # zeros for the index would be a launch
        return weights, index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return None, None, None, None
        logits, index = ctx.saved_tensors
        (rows, experts), k, out = logits.shape, index.shape[1], torch.empty_like(logits)
        sizes = {"K": k, "NORMALIZED": ctx.normalized, "BLOCK": _block(experts)}
        if rows:
            grad = grads[0].contiguous()
            _differentiate[(rows,)](logits, index, grad, out, experts, *index.stride(), **sizes, num_warps=1)
        return out, None, None, None
