"""What the draft learns from a training pass of the policy.

The pass has computed every hidden state, so the draft's own forward is one layer. Nothing flows back into the policy: hidden
states, embeddings and head are detached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from miles_core import Context
from miles_embedded import Packing
from miles_speculative.head import Head

#: Logits held at once, rows x vocabulary.
_LOGITS = 1 << 26


def cross_entropy(head: Head, out: Tensor, tokens: Tensor) -> Tensor:
    """Sum over n rows of -log q(token), float32.

    Args:
        head: predicts by ``logits``.
        out: [n, hidden] what it made of the rows.
        tokens: [n] what followed.
    """

    def share(out: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(head.logits(out).float(), tokens, reduction="sum")

    return _summed(share, head, out, tokens)


def divergence(head: Head, out: Tensor, policy: Tensor, temperature: float) -> Tensor:
    """Sum over n rows of KL(p || q), float32: how far the draft's q is from the policy's p, whole distributions.

    Args:
        head: predicts by ``logits``.
        out: [n, hidden] what it made of the rows.
        policy: [n, hidden] the policy's hidden states, detached.
        temperature: of both.
    """

    def share(out: Tensor, policy: Tensor) -> Tensor:
        with torch.no_grad():
            p = (head.logits(policy).float() / temperature).log_softmax(-1)
        q = (head.logits(out).float() / temperature).log_softmax(-1)
        return functional.kl_div(q, p, reduction="sum", log_target=True)

    return _summed(share, head, out, policy)


def _summed(share: Callable[[Tensor, Tensor], Tensor], head: Head, out: Tensor, other: Tensor) -> Tensor:
    """``share`` over all rows, so many at a time as the logits may hold; computed again in the backward pass where that is several times."""
    rows = max(_LOGITS // len(head.model.get_output_embeddings().weight), 1)
    if len(out) <= rows:
        return share(out, other)
    pieces = zip(out.split(rows), other.split(rows), strict=True)
    return torch.stack([checkpoint(share, *piece, use_reentrant=False) for piece in pieces]).sum()


def entries(head: Head, hidden: Tensor, tokens: Tensor, ctx: Context, call: Any) -> Tensor:
    """The head over all rows of a packed pass.

    Args:
        head: of the model that runs.
        hidden: [rows, hidden] its last hidden states, detached.
        tokens: [T] flat tokens of the micro-batch.
        ctx: of the pass.
        call: through which its layers attended.

    Returns:
        [rows, hidden], see ``Head``.
    """
    packing: Packing = ctx.attached["packing"]
    first = packing.positions == 0
    before = packing.row_of[(ctx.rows - 1).clamp(min=0)].clamp(min=0)
    states = hidden.index_select(0, before).masked_fill(first.unsqueeze(1), 0)
    return head(tokens[ctx.rows], states, packing.positions, call)
