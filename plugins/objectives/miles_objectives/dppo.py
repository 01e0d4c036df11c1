"""DPPO: divergence proximal policy optimization (arXiv 2602.04879), with a binary divergence.

The trust region bounds the divergence of the two policies at a position instead of the ratio of the sampled token. Seen as a choice between
the sampled token, with probability p (now) and q (old), and all others, the divergence D is

    tv: |p - q|        kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    J_t = M_t r_t A,   M_t = 0 if D > delta and the advantage moves the token further away
                             (A > 0 and r_t > 1, or A < 0 and r_t < 1), else 1

A rare token may therefore change its ratio much, and a frequent one little. The paper's old policy is that of the engine
(``--use-rollout-logprobs``). The default delta of each divergence is that of the example in verl. That example subtracts the mean of
the group without dividing by its standard deviation, and verl bounds r. By our choice the advantages are those of GRPO, and r has no bound
below e^20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.plugin import Policy, Run
from miles_core.trainer import ALGORITHMS, Clip, Objective, PolicyLossInputs, TokenLoss
from miles_objectives.config import THRESHOLDS
from miles_objectives.tokens import Metrics, advantages, log_ratios, metrics_of


def make_dppo(run: Run, policy: Policy) -> Objective:
    """Provider of ``--advantage-estimator dppo``: the advantages of GRPO with this loss."""
    options = run.config_of(policy).plugin("objectives")
    return Objective(ALGORITHMS["grpo"].advantage, make_loss(options.dppo_divergence, options.dppo_threshold))


def make_loss(divergence: str, threshold: float | None = None) -> TokenLoss:
    """Create the loss with ``tv`` or ``kl`` and the threshold delta (default: that of the divergence in ``THRESHOLDS``)."""
    delta = THRESHOLDS[divergence] if threshold is None else threshold

    def dppo(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
        mask, log_ratio, advantage = inputs.mask.bool(), log_ratios(inputs), advantages(inputs)
        with torch.no_grad():
            old = torch.where(mask, inputs.old_log_probs, 0.0).double()
            far = binary_divergence(old + log_ratio.double(), old, divergence) > delta
            away = advantage * log_ratio > 0
        loss = torch.where(far & away, 0.0, -advantage * log_ratio.exp())
        return torch.where(mask, loss, 0.0), metrics_of(log_ratio.detach(), inputs.mask, masked_fraction=far & away)

    return dppo


def binary_divergence(now: Tensor, old: Tensor, kind: str) -> Tensor:
    """Compute the divergence between the sampled token and all others, [tokens] float64, from log-probabilities now and before."""
    p, q = now.exp().clamp(max=1.0), old.exp().clamp(max=1.0)
    if kind == "tv":
        return (p - q).abs()
    tiny = torch.finfo(p.dtype).tiny
    rest = torch.where(q < 1, (1 - q) * (((1 - q).clamp(min=tiny)).log() - ((1 - p).clamp(min=tiny)).log()), 0.0)
    return q * (old - now) + rest
