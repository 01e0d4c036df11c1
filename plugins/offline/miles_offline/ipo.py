"""IPO: identity preference optimization (arXiv 2310.12036), with log-ratios averaged over tokens as in TRL.

For a prompt with a chosen answer c of |c| tokens and a rejected answer r:

    margin          h = mean_c log pi/pi_ref - mean_r log pi/pi_ref
    loss            L = (h - 1 / (2 beta))^2                                             beta is ``--kl-coef``
    gradient        dL = 2 (h - 1 / (2 beta)) (mean_c d log pi - mean_r d log pi)

It regresses h to a finite value, where DPO lets it grow for pairs that are always preferred. As for ``dpo``, h is computed before the step, and
-dL is the advantage of each token.
"""

from __future__ import annotations

from torch import Tensor

from miles_core.trainer import AdvantageInputs, Needs, Objective
from miles_offline.pairs import Pairs
from miles_offline.sft import likelihood_loss


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute -2 (h - 1 / (2 beta)) / |c| on the tokens of chosen texts and its counterpart on those of rejected ones, [tokens]."""
    pairs = Pairs.of(inputs)
    chosen, rejected = pairs.sums(by_length=True)
    gap = chosen - rejected - 1 / (2 * inputs.kl_coef)
    pairs.record(gap.square(), inputs.kl_coef * chosen, inputs.kl_coef * rejected)
    return pairs.on_tokens(-2 * gap, by_length=True)


def make_ipo() -> Objective:
    """``--advantage-estimator ipo``."""
    return Objective(advantage, likelihood_loss, Needs(whole_step=False), kl_in_reward=True)
