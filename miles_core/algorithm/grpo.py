"""GRPO: group relative policy optimization (arXiv 2402.03300), with the clip of PPO (arXiv 1707.06347).

The n rollouts of a prompt have the rewards R_1, ..., R_n. For every trained token t of rollout i:

    advantage       A_i = (R_i - mean R) / (std R + 1e-6)                        std with n - 1
    ratio           r_t = pi(t) / pi_old(t)
    loss            L_t = max(-A_i r_t, -A_i clip(r_t, 1 - eps, 1 + eps_high))
    normalization   w_t = 1 / (trained tokens of rollout i * rollouts of the step)

``--eps-clip`` is eps, ``--eps-clip-high`` is eps_high; ``--eps-clip-c c`` also limits L_t to -c A_i where A_i < 0 (dual clip, arXiv
1912.09729). The loss of the optimizer step is the sum over all tokens, micro-batches and ranks of

    w_t (L_t * correction_t + kl_loss_coef * kl_t - entropy_coef * entropy_t)

(``train.loss``; without a plugin the correction is 1). PPO, Dr.GRPO, RLOO, DAPO and REINFORCE++ share this loss of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.algorithm.objective import (
    AdvantageInputs,
    Clip,
    Groups,
    Metrics,
    Objective,
    PolicyLossInputs,
    local_sum,
    on_trained_tokens,
)
from miles_core.algorithm.ratio import advantages_of, fraction, log_ratio_of, ratio_metrics, ratio_of
from miles_core.data.batch import expand, mask_counts

EPS = 1e-6


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute (R - mean) / (std + 1e-6) on every trained token, [tokens]; exactly 0 if all rewards of the group are equal."""
    groups = Groups.of(inputs)
    return on_trained_tokens(inputs, groups.scores(groups.centred / (groups.std + EPS)))


def policy_loss(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the clipped loss with a ratio per token: ([tokens] loss, metrics as (sum, count))."""
    log_ratio = log_ratio_of(inputs)
    return clipped_loss(ratio_of(log_ratio), log_ratio, inputs, clip)


def clipped_loss(ratio: Tensor, log_ratio: Tensor, inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the clipped loss of any ratio [tokens]; ``log_ratio``, of the single tokens, is only reported."""
    mask = inputs.mask.bool()
    advantages = advantages_of(inputs, ratio.dtype)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(clip.low, clip.high)
    loss = torch.maximum(plain, bounded)
    metrics = ratio_metrics(ratio.detach(), log_ratio, mask)
    metrics["clip_fraction_low"] = fraction((ratio < clip.low) & (advantages < 0), mask)
    metrics["clip_fraction_high"] = fraction((ratio > clip.high) & (advantages > 0), mask)
    if clip.dual is not None:
        ceiling = -clip.dual * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        metrics["clip_fraction_dual"] = fraction(beyond, mask)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return torch.where(mask, loss, 0.0), metrics


def rollout_mean(mask: Tensor, lengths: Tensor, rollout: Tensor, sum: Callable[[Tensor], Tensor] = local_sum) -> Tensor:
    """Compute the weight of each token, ``--loss-aggregation rollout_mean``; arguments as for ``choices.loss_weights``."""
    ids, rollout_of = torch.unique(rollout, return_inverse=True)
    rollouts = sum(torch.tensor(float(len(ids)), dtype=torch.float64, device=mask.device)).clamp(min=1.0)
    # integer counts: exact in any order of addition
    counts = torch.zeros(len(ids), dtype=torch.int64, device=mask.device)
    counts = counts.index_add(0, rollout_of.to(mask.device), mask_counts(mask, lengths))
    per_sample = 1.0 / (counts.clamp(min=1).double() * rollouts)
    return torch.where(mask.bool(), expand(per_sample.float()[rollout_of.to(mask.device)], lengths), 0.0)


GRPO = Objective(advantage, policy_loss)
