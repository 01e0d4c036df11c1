"""SAPO: soft adaptive policy optimization (arXiv 2511.20347).

A smooth gate replaces the clip of the ratio r_t:

    J_t = A (4 / tau) sigmoid(tau (r_t - 1)),   tau = tau_positive if A > 0, else tau_negative

At r_t = 1 the gradient is that of the plain policy gradient, and it fades on both sides; a larger tau fades faster. The paper's
experiments use tau_positive = 1 and tau_negative = 1.05.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.plugin import Policy, Run
from miles_core.trainer import ALGORITHMS, Clip, Objective, PolicyLossInputs, TokenLoss
from miles_objectives.tokens import Metrics, advantages, log_ratios, metrics_of


def make_sapo(run: Run, policy: Policy) -> Objective:
    """Provider of ``--advantage-estimator sapo``: the advantages of GRPO with this loss."""
    options = run.config_of(policy).plugin("objectives")
    return Objective(ALGORITHMS["grpo"].advantage, make_loss(options.sapo_tau_positive, options.sapo_tau_negative))


def make_loss(positive: float, negative: float) -> TokenLoss:
    """Create the loss with the temperatures of positive and negative advantages."""

    def sapo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
        log_ratio, advantage = log_ratios(inputs), advantages(inputs)
        tau = torch.full_like(advantage, negative).masked_fill(advantage > 0, positive)
        loss = -advantage * (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
        return torch.where(inputs.mask.bool(), loss, 0.0), metrics_of(log_ratio.detach(), inputs.mask)

    return sapo
