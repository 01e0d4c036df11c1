"""SFT: supervised training, the negative log-likelihood of the assistant's tokens.

    loss            L_t = -log pi(t)                  for every trained token t

``--loss-aggregation`` weights the tokens: ``token_mean`` is the mean over all trained tokens of the optimizer step, over all its micro-batches
and ranks, as in TRL's ``SFTTrainer``; ``rollout_mean`` gives every row the same weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.trainer import AdvantageInputs, Clip, Objective, PolicyLossInputs


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Return 1 on every trained token, [tokens]."""
    return inputs.mask.bool().float()


def likelihood_loss(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Compute -A log pi for every token, [tokens]: the likelihood weighted by the advantage, which has no old policy and no clip."""
    return torch.where(inputs.mask.bool(), -inputs.advantages * inputs.log_probs, 0.0), {}


def make_sft() -> Objective:
    """``--advantage-estimator sft``."""
    return Objective(advantage, likelihood_loss)
