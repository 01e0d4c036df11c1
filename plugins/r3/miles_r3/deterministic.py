"""``--deterministic-expert-routing``: the choice of experts depends only on the scores.

Logits are computed in FP32 with rows padded to tiles of 32, because a CPU's matrix product of fewer rows may round differently. Ties go to
the lower expert index, and a row's experts are in ascending order, so that sums over experts have the same order everywhere. Engine, trainer
and reference model use the same rule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from miles_r3.routers import Weights, setting, sigmoid_plain, sigmoid_scaled

TILE = 32


def router_logits(router: nn.Module, hidden: Tensor) -> Tensor:
    """[rows, experts] FP32."""
    weight, bias = router.weight, getattr(router, "bias", None)
    assert isinstance(weight, Tensor)
    rows = hidden.reshape(-1, weight.shape[-1]).float()
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
    return functional.linear(padded, weight.float(), bias.float() if isinstance(bias, Tensor) else None)[: len(rows)]


def scores_for_choice(logits: Tensor, block: nn.Module, rule: Weights) -> Tensor:
    """Return [rows, experts]: the scores from which the family's router takes the top-k.

    Softmax routers choose by logit. Sigmoid routers add their correction bias and exclude expert groups if the family limits groups."""
    if rule not in (sigmoid_scaled, sigmoid_plain):
        return logits
    scores = logits.sigmoid()
    bias = setting(block, "e_score_correction_bias", None)
    if bias is not None:
        scores = scores + bias.float()
    groups, kept = setting(block, "n_group", 1), setting(block, "topk_group", 1)
    if rule is not sigmoid_scaled or groups == 1 or kept == groups:
        return scores
    grouped = scores.unflatten(-1, (groups, -1))
    best = lowest_first_top_k(grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1), kept)
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def lowest_first_top_k(scores: Tensor, k: int) -> Tensor:
    """Return [..., k] int64: the indices of the k largest scores in ascending order; ties go to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True)[1][..., :k].sort(-1)[0]
