"""GMPO: geometric-mean policy optimization (arXiv 2507.20673).

For a response with advantage A and n trained tokens, the objective is the geometric mean of its clipped ratios times A:

    J = A exp( (1/n) sum_t c_t ),   c_t = min(log r_t, eps) if A > 0,  max(log r_t, -eps) if A < 0

A ratio is clipped only in the direction in which the advantage would move it further. Every trained token of the response has the loss -J, so the
mean over the tokens of a response is -J. The paper's eps is 0.4 (section 4): ratios between e^-0.4 and e^0.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.plugin import Policy, Run
from miles_core.trainer import ALGORITHMS, Clip, Objective, PolicyLossInputs, TokenLoss
from miles_objectives.tokens import Metrics, advantages, log_ratios, metrics_of


def make_gmpo(run: Run, policy: Policy) -> Objective:
    """Provider of ``--advantage-estimator gmpo``: the advantages of GRPO with this loss."""
    options = run.config_of(policy).plugin("objectives")
    return Objective(ALGORITHMS["grpo"].advantage, make_loss(options.gmpo_clip))


def make_loss(eps: float) -> TokenLoss:
    """Create the loss with the bound ``eps`` of the log-ratios."""

    def gmpo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
        assert inputs.segments is not None
        mask, log_ratio, advantage = inputs.mask.bool(), log_ratios(inputs), advantages(inputs)
        bounded = torch.where(advantage >= 0, log_ratio.clamp(max=eps), log_ratio.clamp(min=-eps))
        count = int(inputs.segments.max()) + 1 if len(inputs.segments) else 0
        sums = bounded.new_zeros(count).index_add(0, inputs.segments, torch.where(mask, bounded, 0.0))
        lengths = bounded.new_zeros(count).index_add(0, inputs.segments, mask.to(bounded.dtype)).clamp(min=1.0)
        loss = -advantage * (sums / lengths).exp()[inputs.segments]
        return torch.where(mask, loss, 0.0), metrics_of(
            log_ratio.detach(), inputs.mask, clip_fraction=bounded != log_ratio
        )

    return gmpo
