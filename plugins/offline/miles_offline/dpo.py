"""DPO: direct preference optimization (arXiv 2305.18290).

For a prompt with a chosen answer c and a rejected answer r:

    margin          h = beta (sum_c log pi/pi_ref - sum_r log pi/pi_ref)                 beta is ``--kl-coef``
    loss            L = -log sigmoid(h)
    gradient        dL = -beta sigmoid(-h) (sum_c d log pi - sum_r d log pi)

The loss of a pair depends on both of its texts, and a micro-batch may hold only one of them. Therefore h is computed before the step, from the
pass that also serves as old log-probabilities, and the step's gradient is a policy gradient: every token of c has the advantage
beta sigmoid(-h), every token of r its negative. The optimizer step is the first one that uses h, so this is the gradient of L exactly,
for every split into micro-batches. The two texts are one rollout: they share an optimizer step, and ``--loss-aggregation constant`` with
the length 1 divides their sum by the number of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles_core.trainer import AdvantageInputs, Needs, Objective
from miles_offline.pairs import Pairs
from miles_offline.sft import likelihood_loss


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute beta sigmoid(-h) on the tokens of chosen texts and its negative on those of rejected ones, [tokens]."""
    pairs = Pairs.of(inputs)
    chosen, rejected = pairs.sums()
    margin = inputs.kl_coef * (chosen - rejected)
    pairs.record(-logsigmoid(margin), inputs.kl_coef * chosen, inputs.kl_coef * rejected)
    return pairs.on_tokens(inputs.kl_coef * torch.sigmoid(-margin), by_length=False)


def make_dpo() -> Objective:
    """``--advantage-estimator dpo``."""
    return Objective(advantage, likelihood_loss, Needs(whole_step=False), kl_in_reward=True)
