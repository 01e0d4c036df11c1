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

from miles_core.trainer import Context
from miles_embedded import Packing, logits_of
from miles_speculative.draft import Draft

#: Logits held at once, rows x vocabulary.
_LOGITS = 1 << 26


def cross_entropy(draft: Draft, out: Tensor, tokens: Tensor) -> Tensor:
    """Sum over n rows of -log q(token), float32.

    Args:
        draft: predicts by ``logits``.
        out: [n, hidden] what it made of the rows.
        tokens: [n] what followed.
    """

    def share(out: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(draft.logits(out).float(), tokens, reduction="sum")

    return _summed(share, draft, out, tokens)


def divergence(draft: Draft, out: Tensor, policy: Tensor, temperature: float) -> Tensor:
    """Sum over n rows of KL(p || q), float32: how far the draft's q is from the policy's p, whole distributions.

    Args:
        draft: predicts by ``logits``.
        out: [n, hidden] what it made of the rows.
        policy: [n, hidden] the policy's hidden states, detached.
        temperature: of both.
    """

    def share(out: Tensor, policy: Tensor) -> Tensor:
        with torch.no_grad():
            p = (logits_of(draft.policy, policy).float() / temperature).log_softmax(-1)
        q = (draft.logits(out).float() / temperature).log_softmax(-1)
        return functional.kl_div(q, p, reduction="sum", log_target=True)

    return _summed(share, draft, out, policy)


def distance(out: Tensor, policy: Tensor) -> Tensor:
    """Sum over n rows of the mean smooth L1 distance between what a head made, ``out`` [n, hidden], and the policy's hidden states [n, hidden],
    float32: the next draft starts from the one in place of the other."""
    return functional.smooth_l1_loss(out.float(), policy.float(), reduction="sum") / out.shape[-1]


def _summed(share: Callable[[Tensor, Tensor], Tensor], draft: Draft, out: Tensor, other: Tensor) -> Tensor:
    """``share`` over all rows, so many at a time as the logits may hold; computed again in the backward pass where that is several times."""
    rows = max(_LOGITS // len(draft.policy.get_output_embeddings().weight), 1)
    if len(out) <= rows:
        return share(out, other)
    pieces = zip(out.split(rows), other.split(rows), strict=True)
    return torch.stack([checkpoint(share, *piece, use_reentrant=False) for piece in pieces]).sum()


def entries(draft: Draft, hidden: Tensor, tokens: Tensor, ctx: Context, call: Any) -> Tensor:
    """The draft over all rows of a packed pass.

    Args:
        draft: of the model that runs.
        hidden: [rows, hidden] its last hidden states, detached.
        tokens: [T] flat tokens of the micro-batch.
        ctx: of the pass.
        call: through which its layers attended.

    Returns:
        [rows, hidden], see ``Draft``.
    """
    packing: Packing = ctx.attached["packing"]
    first = packing.positions == 0
    before = packing.row_of[(ctx.rows - 1).clamp(min=0)].clamp(min=0)
    states = hidden.index_select(0, before).masked_fill(first.unsqueeze(1), 0)
    return draft(tokens[ctx.rows], states, packing.positions, call)
