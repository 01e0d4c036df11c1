"""Speculative sampling: accepts drafted tokens so that the emitted tokens follow the model's distribution.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318): a token x drawn from the draft's q is accepted with
probability min(1, p(x) / q(x)). The first rejected token is replaced by a draw from norm(max(0, p - q)); if all are accepted, one more token
is drawn from p. A greedy distribution is a point mass: a draft is accepted if it equals the model's choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_embedded import pick

#: Random streams, see ``miles_embedded.stream_start``: the token after the accepted drafts, acceptance of drafts, the drafts.
DRAW, KEEP, DRAFT = 0, 1, 2


def verify(p: Tensor, q: Tensor, drafts: Tensor, room: Tensor, keep: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each row's drafts and draw the next token.

    Args:
        p: [rows, k + 1, vocab] the model's probabilities at each position; arbitrary beyond ``room``.
        q: [rows, k, vocab] the draft's probabilities.
        drafts: [rows, k] int64 drafted tokens.
        room: [rows] number of usable drafts, at most k.
        keep: [rows, k] uniform numbers in (0, 1) for the acceptance.
        draw: [rows, k + 1] uniform numbers in (0, 1) for the next token.

    Returns:
        [rows] number of accepted drafts, and [rows] the token after them.
    """
    rows, k = drafts.shape
    each = torch.arange(rows, device=p.device)
    wanted = drafts.unsqueeze(-1)
    ratio = p[:, :k].gather(-1, wanted).squeeze(-1).double() / q.gather(-1, wanted).squeeze(-1).double()
    kept = ((keep < ratio) & (torch.arange(k, device=p.device) < room.unsqueeze(1))).long().cumprod(1).sum(1)
    target = p[each, kept]
    rest = (target - q[each, kept.clamp(max=k - 1)]).clamp(min=0)
    # if p equals q up to rounding, the residual is empty; then draw from p
    whole = (kept == room) | (rest.sum(-1) <= 0)
    rest = torch.where(whole.unsqueeze(1), target, rest)
    return kept, pick(rest, draw[each, kept])
