"""Losses of the draft in a training pass of the policy.

The pass has already computed the hidden states, so only the draft itself runs in addition. The policy receives no gradient: hidden states,
embeddings and output layer are detached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from miles_core.trainer import Context
from miles_embedded import Packing, logits_of
from miles_speculative.draft import Draft

#: Maximum number of logits that exist at once, rows x vocabulary.
_LOGITS = 1 << 26


def cross_entropy(draft: Draft, out: Tensor, tokens: Tensor) -> Tensor:
    """Return the sum over n rows of -log q(token), float32.

    Args:
        draft: the draft.
        out: [n, hidden] output of the draft.
        tokens: [n] the next tokens.
    """

    def share(out: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(draft.logits(out).float(), tokens, reduction="sum")

    return _sum_in_chunks(share, draft, out, tokens)


def divergence(draft: Draft, out: Tensor, policy: Tensor, temperature: float) -> Tensor:
    """Return the sum over n rows of KL(p || q), float32, with the policy's distribution p and the draft's q over the whole vocabulary.

    Args:
        draft: the draft.
        out: [n, hidden] output of the draft.
        policy: [n, hidden] the policy's hidden states, detached.
        temperature: temperature of both distributions.
    """

    def share(out: Tensor, policy: Tensor) -> Tensor:
        with torch.no_grad():
            p = (logits_of(draft.policy, policy).float() / temperature).log_softmax(-1)
        q = (draft.logits(out).float() / temperature).log_softmax(-1)
        return functional.kl_div(q, p, reduction="sum", log_target=True)

    return _sum_in_chunks(share, draft, out, policy)


def distance(out: Tensor, policy: Tensor) -> Tensor:
    """Return the sum over n rows of the mean smooth L1 distance between a head's output and the policy's hidden states, float32.

    Both are [n, hidden]. The next draft uses the head's output in place of the policy's hidden state."""
    return functional.smooth_l1_loss(out.float(), policy.float(), reduction="sum") / out.shape[-1]


def _sum_in_chunks(share: Callable[[Tensor, Tensor], Tensor], draft: Draft, out: Tensor, other: Tensor) -> Tensor:
    """Sum ``share`` over chunks of rows that limit the logits to ``_LOGITS``; several chunks are recomputed in the backward pass."""
    rows = max(_LOGITS // len(draft.policy.get_output_embeddings().weight), 1)
    if len(out) <= rows:
        return share(out, other)
    pieces = zip(out.split(rows), other.split(rows), strict=True)
    return torch.stack([checkpoint(share, *piece, use_reentrant=False) for piece in pieces]).sum()


def entries(draft: Draft, hidden: Tensor, tokens: Tensor, ctx: Context, call: Any, first_seen: bool = True) -> Tensor:
    """Run the draft over all rows of a packed pass.

    Args:
        draft: the draft of the model.
        hidden: [rows, hidden] the model's last hidden states, detached.
        tokens: [T] flat tokens of the micro-batch.
        ctx: context of the pass.
        call: the backend's call of the pass.
        first_seen: whether tokens attend to the entry of their sequence's first token, see ``Draft.HIDDEN``.

    Returns:
        [rows, hidden], see ``Draft``.
    """
    packing: Packing = ctx.attached["packing"]
    if not first_seen:
        call = type(call)(ctx, hide_first(packing))
    first = packing.positions == 0
    before = packing.row_of[(ctx.rows - 1).clamp(min=0)].clamp(min=0)
    states = hidden.index_select(0, before).masked_fill(first.unsqueeze(1), 0)
    return draft(tokens[ctx.rows], states, packing.positions, call)


def hide_first(packing: Packing) -> Packing:
    """Return the layout of a packed pass in which no other token attends to the first one of its sequence.

    The first row of each trunk becomes a segment of its own. A trunk of one token stays as it is.
    """
    trunks = packing.trunks
    rest = np.flatnonzero(trunks.length > 1)
    start = np.concatenate([trunks.start, trunks.start[rest] + 1])
    length = np.concatenate([np.minimum(trunks.length, 1), trunks.length[rest] - 1])
    order = start.argsort(kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    moved = place[: len(trunks)].copy()
    moved[rest] = place[len(trunks) :]
    branches = packing.branches
    return replace(
        packing,
        trunks=replace(trunks, start=start[order], length=length[order], trunk=np.full(len(order), -1)),
        branches=replace(branches, trunk=moved[branches.trunk]),
    )
