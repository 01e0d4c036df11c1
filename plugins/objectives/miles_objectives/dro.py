"""DRO: direct reward optimization with a squared log-ratio (arXiv 2405.19107), per token.

    J_t = A log pi - (beta / 2) (log pi - log pi_old)^2

The square keeps the policy near the old one, in both directions and without a clip; the maximum of J_t is at a log-ratio of A / beta.

In the paper a term belongs to a response: it has the log-ratio to a reference policy, and the reward minus a learned value. verl's and
Tinker's losses of this name have a term per token, the old policy as reference, and an advantage; so does this one. The default of beta, 0.05,
is the example in Tinker's documentation; the paper gives no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.plugin import Policy, Run
from miles_core.trainer import ALGORITHMS, Clip, Objective, PolicyLossInputs, TokenLoss
from miles_objectives.tokens import Metrics, advantages, log_ratios, metrics_of


def make_dro(run: Run, policy: Policy) -> Objective:
    """Provider of ``--advantage-estimator dro``: the advantages of GRPO with this loss."""
    options = run.config_of(policy).plugin("objectives")
    return Objective(ALGORITHMS["grpo"].advantage, make_loss(options.dro_beta))


def make_loss(beta: float) -> TokenLoss:
    """Create the loss with the coefficient ``beta``."""

    def dro(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
        mask, log_ratio = inputs.mask.bool(), log_ratios(inputs)
        log_probs = torch.where(mask, inputs.log_probs, 0.0)
        loss = -advantages(inputs) * log_probs + 0.5 * beta * log_ratio.square()
        return torch.where(mask, loss, 0.0), metrics_of(log_ratio.detach(), inputs.mask)

    return dro
