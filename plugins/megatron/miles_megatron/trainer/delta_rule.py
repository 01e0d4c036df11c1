"""The kernels of gated delta nets in torch, over packed samples, where flash-linear-attention is missing or there is no GPU.

The functions have the arguments that Megatron-Core passes to flash-linear-attention. Every sample starts with an empty state: its results and
gradients do not depend on the other samples of the row.

A head keeps a state S [key size, value size]. A token with query q, key k, value v, log decay g and rate b updates it, and reads it
(Yang et al., arXiv 2412.06464, section 3.1):

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  out = S^T q

With c_i the sum of the decays up to token i of a chunk, K, V, Q its rows and S the state before it, the corrections U of the chunk solve
(I + A) U = b (V - exp(c) K S), with A_ij = b_i exp(c_i - c_j) k_i k_j for j < i. The outputs are exp(c) Q S + (exp(c_i - c_j) q_i k_j for j <= i) U.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

#: Tokens of a chunk.
_CHUNK = 64


def normalize(x: Tensor) -> Tensor:
    """Divide the rows [..., size] by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve(x: Tensor, weight: Tensor, cu_seqlens: Tensor, bias: Tensor | None, **fixed: Any) -> tuple[Tensor, None]:
    """Convolve every channel with its previous tokens of the same sample, and apply SiLU.

    Args:
        x: [1, tokens, channels].
        weight: [channels, width]; the last column belongs to the token itself.
        cu_seqlens: [samples + 1] start of each sample.
        bias: [channels], or None.
        fixed: arguments of the kernel that always have the same value.

    Returns:
        [1, tokens, channels], and None for the final state.
    """
    at = torch.arange(x.shape[1], device=x.device)
    starts = cu_seqlens.long().to(x.device)
    position = at - starts[torch.bucketize(at, starts[1:], right=True)]
    found = x * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        found = found + torch.where((position >= back)[:, None], earlier, 0) * weight[:, -1 - back]
    return silu(found if bias is None else found + bias), None


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **fixed: Any
) -> tuple[Tensor, None]:
    """Compute the outputs of the gated delta rule, in FP32.

    Args:
        query, key: [1, tokens, heads, key size]; queries are divided by the root of the key size.
        value: [1, tokens, heads, value size].
        g, beta: [1, tokens, heads] log decay and rate.
        cu_seqlens: [samples + 1] start of each sample.
        fixed: arguments of the kernel that always have the same value.

    Returns:
        [1, tokens, heads, value size], and None for the final state.
    """
    tokens, size = _chunks(cu_seqlens.tolist())
    rows, chunk = tokens.to(query.device), tokens.shape[1]

    def table(
        x: Tensor,
    ) -> Tensor:  # [chunks, heads, tokens of a chunk, ...]; rows of padding are 0 and change no state
        padded = pad(x[0].float(), (0, 0) * (x.dim() - 2) + (0, 1))
        return padded[rows].transpose(1, 2)

    q, k, v, rate, sums = table(query), table(key), table(value), table(beta), table(g).cumsum(-1)
    q = q * key.shape[-1] ** -0.5
    decays = (sums[..., :, None] - sums[..., None, :]).masked_fill(_above(chunk, rows.device), -torch.inf).exp()
    system = rate[..., None] * (k @ k.mT) * decays
    both = torch.cat([v, sums.exp()[..., None] * k], -1) * rate[..., None]
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside, reading = (q @ k.mT) * decays, sums.exp()[..., None] * q
    last = sums[..., -1:]
    kept, written = last.exp()[..., None], (last - sums).exp()[..., None] * k

    state = q.new_zeros(size[0], q.shape[1], k.shape[-1], v.shape[-1])
    found, first = [], 0
    for samples in size:  # of the samples with so many chunks or more, which are the first ones
        now, state = slice(first, first + samples), state[:samples]
        change = own[now] - read[now] @ state
        found.append(reading[now] @ state + inside[now] @ change)
        state = state * kept[now] + written[now].mT @ change
        first += samples
    out = torch.cat(found).transpose(1, 2).flatten(0, 1)
    flat = rows.flatten()
    order = torch.empty(query.shape[1], dtype=torch.long, device=rows.device)
    real = flat < query.shape[1]
    order[flat[real]] = torch.arange(len(flat), device=rows.device)[real]
    return out[order].to(value.dtype)[None], None


def _chunks(bounds: list[int]) -> tuple[Tensor, list[int]]:
    """Divide samples into chunks: the first chunks of all samples, then the second ones, and so on; longest samples first.

    Returns:
        [chunks, tokens of a chunk] index of each token, or the number of tokens for padding; and the numbers of first, second, ... chunks.
    """
    samples = sorted(itertools.pairwise(bounds), key=lambda pair: pair[0] - pair[1])
    chunk = min(_CHUNK, max(samples[0][1] - samples[0][0], 1))
    rows, size, total = [], [], bounds[-1]
    for offset in range(0, max(samples[0][1] - samples[0][0], 1), chunk):
        starts = [(start + offset, end) for start, end in samples if start + offset < end]
        size.append(len(starts))
        for start, end in starts:
            at = torch.arange(start, start + chunk)
            rows.append(torch.where(at < end, at, total))
    return torch.stack(rows), size


def _above(chunk: int, device: torch.device) -> Tensor:
    """Return [chunk, chunk] bool: the elements above the diagonal."""
    return torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)
