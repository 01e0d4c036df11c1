"""Which drafted tokens are kept, so that what is emitted has the model's own distribution.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a token x drawn from the draft's q
is kept with probability min(1, p(x) / q(x)). The first that is not is replaced by a draw from norm(max(0, p - q)), and when all are
kept, one more token is drawn from p. A greedy distribution is a point mass: a draft is kept where it is the model's own choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_embedded import pick


def verify(p: Tensor, q: Tensor, drafts: Tensor, room: Tensor, keep: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Keep a prefix of each row's drafts and draw the token behind it.

    Args:
        p: [rows, k + 1, vocab] the model's probabilities at each position; beyond ``room`` anything.
        q: [rows, k, vocab] those that the drafts were drawn from.
        drafts: [rows, k] int64.
        room: [rows] drafts that count, at most k.
        keep: [rows, k] numbers in (0, 1) that decide on the drafts.
        draw: [rows, k + 1] numbers in (0, 1) for the token behind what is kept.

    Returns:
        [rows] drafts kept, and [rows] the token that follows them.
    """
    rows, k = drafts.shape
    each = torch.arange(rows, device=p.device)
    wanted = drafts.unsqueeze(-1)
    ratio = p[:, :k].gather(-1, wanted).squeeze(-1).double() / q.gather(-1, wanted).squeeze(-1).double()
    kept = ((keep < ratio) & (torch.arange(k, device=p.device) < room.unsqueeze(1))).long().cumprod(1).sum(1)
    target = p[each, kept]
    rest = (target - q[each, kept.clamp(max=k - 1)]).clamp(min=0)
    # where p equals q but for rounding nothing is left over, and p is as good
    whole = (kept == room) | (rest.sum(-1) <= 0)
    rest = torch.where(whole.unsqueeze(1), target, rest)
    return kept, pick(rest, draw[each, kept])
