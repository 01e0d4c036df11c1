"""CISPO: clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, section 3.1).

The n rollouts of a prompt have the rewards R_1, ..., R_n. For every trained token t of rollout i:

    advantage       A_i = (R_i - mean R) / (std R + 1e-6)                        as in GRPO
    ratio           r_t = pi(t) / pi_old(t)
    loss            L_t = -stop_gradient(min(r_t, 1 + eps_high)) A_i log pi(t)
    normalization   the paper's is ``--loss-aggregation token_mean`` (see ``dapo``)

The ratio is a weight without gradient, clipped above only, so every token keeps a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.objective import Clip, Metrics, Objective, PolicyLossInputs
from miles_core.algorithm.ratio import advantages_of, fraction, log_ratio_of, ratio_metrics, ratio_of


def policy_loss(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the policy gradient loss weighted by the detached ratio: ([tokens] loss, metrics as (sum, count))."""
    mask = inputs.mask.bool()
    log_ratio = log_ratio_of(inputs)
    ratio = ratio_of(log_ratio.detach())
    log_probs = torch.where(mask, inputs.log_probs, 0.0)
    loss = -ratio.clamp(max=clip.high) * advantages_of(inputs, ratio.dtype) * log_probs
    metrics = ratio_metrics(ratio, log_ratio, mask)
    metrics["clip_fraction_high"] = fraction(ratio > clip.high, mask)
    return loss, metrics


CISPO = Objective(grpo.advantage, policy_loss)
