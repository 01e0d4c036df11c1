"""One token of gated delta nets (Yang et al. 2024, arXiv 2412.06464), for states that stay where they are stored.

A sequence and head keep a matrix S [key dim, value dim]. A token decays it, S <- exp(g) S, and corrects what it returns for the token's key:
S <- S + k (beta (v - S^T k))^T. The result is S^T q. In torch each of these steps reads or writes all of S; here a token reads and writes it once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2

#: Columns of S of a program.
_COLUMNS = 32


# fmt: off
@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _advance(  # type: ignore[no-untyped-def]
    query, key, value, decay, beta, out, states, before, after, scale, heads, shared, query_stride, key_stride, value_stride,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, NORMALIZE: tl.constexpr,
):
    """Program (row * heads + head, block of columns)."""
    at = tl.program_id(0)
    row, head = (at // heads).to(tl.int64), at % heads
    i, j = tl.arange(0, BLOCK_KEY), tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    q = tl.load(query + row * query_stride + head // shared * KEY + i, mask=i < KEY, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_stride + head // shared * KEY + i, mask=i < KEY, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_stride + head * VALUE + j, mask=j < VALUE, other=0.0).to(tl.float32)
    if NORMALIZE:
        q, k = _unit(q), _unit(k)
    inside = (i[:, None] < KEY) & (j[None, :] < VALUE)
    entry = head.to(tl.int64) * KEY * VALUE + i[:, None] * VALUE + j[None, :]
    size = heads.to(tl.int64) * KEY * VALUE
    state = tl.load(states + tl.load(before + row) * size + entry, mask=inside, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(decay + at).to(tl.float32))
    change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + at).to(tl.float32)
    state = state + k[:, None] * change[None, :]
    tl.store(states + tl.load(after + row) * size + entry, state.to(states.dtype.element_ty), mask=inside)
    result = tl.sum(state * (q * scale)[:, None], 0)
    tl.store(out + at.to(tl.int64) * VALUE + j, result.to(out.dtype.element_ty), mask=j < VALUE)
# fmt: on


def advance_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    before: Tensor,
    after: Tensor,
    normalize: bool,
) -> Tensor:
    """Advance each sequence's state by one token.

    Args:
        query, key: [sequences, 1, key heads, key dim].
        value: [sequences, 1, heads, value dim]; consecutive heads share a key head.
        decay, beta: [sequences, 1, heads]; ``decay`` is g, the logarithm of the factor.
        states: [states, heads, key dim, value dim], contiguous.
        before, after: [sequences] where the states in front of the token are, and where those after it are stored.
        normalize: divide query and key by their length.

    Returns:
        [sequences, 1, heads, value dim] in the dtype of ``query``.
    """
    rows, _, heads, width = value.shape
    dim = key.shape[-1]
    query, key, value = (_heads_in_order(x) for x in (query, key, value))
    out = query.new_empty(value.shape)
    if rows:
        grid = (rows * heads, cdiv(width, _COLUMNS))
        strides = (x.stride(0) for x in (query, key, value))
        _advance[grid](
            *(query, key, value, decay.contiguous(), beta.contiguous(), out, states, before, after),
            *(dim**-0.5, heads, heads // key.shape[2], *strides),
            *(dim, width, next_power_of_2(dim), min(_COLUMNS, next_power_of_2(width)), normalize),
        )
    return out


def _heads_in_order(x: Tensor) -> Tensor:
    """Return ``x`` [rows, 1, heads, dim], copied unless the heads of a row follow each other in memory."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()
