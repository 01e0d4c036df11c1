"""The kernel of Mamba-2 in torch, over packed samples, where there is no GPU.

``convolve_and_scan`` has the arguments that Megatron-Core passes to mamba-ssm's ``mamba_split_conv1d_scan_combined``. Every sample starts with an
empty state: its results and gradients do not depend on the other samples of the row.

A head keeps a state S [head size, state size]. A token with x, B, C and step d > 0 updates it, and reads it (Dao and Gu, arXiv 2405.21060,
section 2):

    S <- exp(d A) S + d x B^T;  out = S C + D x

With c_i the sum of d A up to token i of a chunk and S the state before it (section 6),

    out_i = exp(c_i) S C_i + sum over j <= i of exp(c_i - c_j) (C_i . B_j) d_j x_j.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus


def convolve_and_scan(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor,
    **fixed: Any,
) -> Tensor:
    """Compute a Mamba-2 mixer between its two projections, without the norm; in FP32 except for the convolution.

    Args:
        zxbcdt: [1, tokens, 2 heads x headdim + 2 ngroups x state + heads] gate, x, B, C and steps.
        weight: [channels of x, B and C, width] of the convolution; the last column belongs to the token itself.
        bias: [channels].
        dt_bias: [heads] added to the steps before softplus.
        A: [heads], negative.
        D: [heads].
        chunk_size: tokens of a chunk.
        headdim: elements of a head.
        ngroups: number of groups of heads that share B and C.
        seq_idx: [1, tokens] sample of each token, in ascending order.
        fixed: arguments of the kernel that always have the same value.

    Returns:
        [1, tokens, heads x headdim]: the output, multiplied by SiLU of the gate.
    """
    heads = len(A)
    inner = heads * headdim
    shared = (len(weight) - inner) // 2
    gate, joined, steps = zxbcdt[0].split([inner, len(weight), heads], -1)
    starts = _starts(seq_idx[0])
    x, b, c = silu(convolve(joined, weight, bias, starts)).split([inner, shared, shared], -1)
    repeat = heads // ngroups
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(repeat, 1).float() for part in (b, c))
    values = x.unflatten(-1, (heads, headdim)).float()
    d = softplus(steps.float() + dt_bias)
    out = scan(values * d[..., None], d * A, b, c, starts, chunk_size) + D.float()[:, None] * values
    return (out.flatten(1) * silu(gate.float())).to(zxbcdt.dtype)[None]


def convolve(x: Tensor, weight: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    """Convolve every channel of [tokens, channels] with its previous tokens of the same sample. starts: [tokens] first token of the sample."""
    position = torch.arange(len(x), device=x.device) - starts
    found = x * weight[:, -1] + bias
    for back in range(1, weight.shape[1]):
        earlier = pad(x, (0, 0, back, 0))[: len(x)]
        found = found + torch.where((position >= back)[:, None], earlier, 0) * weight[:, -1 - back]
    return found


def scan(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, starts: Tensor, chunk: int) -> Tensor:
    """Scan packed samples one after another, chunk by chunk.

    Args:
        x: [tokens, heads, head size], multiplied by the steps.
        decay: [tokens, heads] log decay.
        b, c: [tokens, heads, state].
        starts: [tokens] first token of each token's sample.
        chunk: tokens of a chunk.

    Returns:
        [tokens, heads, head size].
    """
    empty = x.new_zeros(x.shape[1], x.shape[2], b.shape[2])
    found = []
    for first in starts.unique().tolist():
        state, last = empty, first + int((starts == first).sum())
        for at in range(first, last, chunk):
            part = slice(at, min(at + chunk, last))
            sums = decay[part].cumsum(0).T  # [heads, tokens of the chunk]
            above = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=x.device).triu(1)
            decays = (sums[:, :, None] - sums[:, None, :]).masked_fill(above, -torch.inf).exp()
            scores = torch.einsum("ihn,jhn->hij", c[part], b[part]) * decays
            own = torch.einsum("hij,jhp->ihp", scores, x[part])
            found.append(own + torch.einsum("ihn,hpn->ihp", sums.exp().T[..., None] * c[part], state))
            written = decays[:, -1].T[..., None] * b[part]
            state = sums[:, -1].exp()[:, None, None] * state + torch.einsum("jhp,jhn->hpn", x[part], written)
    return torch.cat(found)


def _starts(samples: Tensor) -> Tensor:
    """Return [tokens]: the first token of each token's sample. samples: [tokens] ascending numbers."""
    return torch.searchsorted(samples, samples)
