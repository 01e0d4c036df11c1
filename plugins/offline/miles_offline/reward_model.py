"""Reward models: a score of a text, trained on preferences with the Bradley-Terry loss (arXiv 2203.02155, section 3.5).

For a prompt with a chosen text c and a rejected text r, whose scores are r_c and r_r:

    gap             h = r_c - r_r - m                          m is the pair's column ``margin``, or 0 (arXiv 2307.09288, section 3.2.2)
    loss            L = -log sigmoid(h) + a (r_c + r_r)^2      a is ``--center-rewards-coefficient`` (arXiv 2312.09244)
    gradient        dL = (-sigmoid(-h) + 2 a s) d r_c + (sigmoid(-h) + 2 a s) d r_r,   s = r_c + r_r

The score of a text is what the head computes from the hidden state of its last token. As for ``dpo``, the scores are computed before the
step, and -dL is the advantage of each text, so a micro-batch may hold one text of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles_core.data import Batch, Sample
from miles_core.plugin import MilesError, Policy, Run
from miles_core.trainer import AdvantageInputs, Context, LearnerHandle, Loss, Needs, Objective, Output
from miles_offline.pairs import Pairs
from miles_offline.ratios import on_tokens, per_sample

#: Columns of a batch: the score of each text before the step, at the token after its end; the margin of each pair.
SCORES, MARGIN = "values", "reward_margin"


def make_advantage(center: float) -> Objective:
    """Create the objective with the coefficient of centered scores."""

    def advantage(inputs: AdvantageInputs) -> Tensor:
        """Compute -dL of each text, [tokens]."""
        assert inputs.batch is not None
        pairs = Pairs.of(inputs)
        values = torch.where(inputs.mask.bool(), inputs.batch.column(SCORES).double(), 0.0)
        scores = per_sample(values, inputs)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        # absent on a rank without samples
        margin = inputs.batch.scalars.get(MARGIN, scores.new_zeros(len(scores))).cpu()[pairs.chosen]
        gap, total = chosen - rejected - margin, chosen + rejected
        pairs.record(-logsigmoid(gap) + center * total.square(), chosen, rejected)
        gradient = torch.zeros_like(scores)
        gradient[pairs.chosen] = torch.sigmoid(-gap) - 2 * center * total
        gradient[pairs.rejected] = -torch.sigmoid(-gap) - 2 * center * total
        return on_tokens(gradient, inputs)

    return Objective(advantage, needs=Needs(old=False, whole_step=False, columns=(SCORES, MARGIN)))


def make_reward_model(run: Run, policy: Policy) -> Objective:
    """``--advantage-estimator reward_model``."""
    return make_advantage(run.config_of(policy).plugin("offline").center_rewards_coefficient)


def score_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
    """Compute -A r for every text, whose gradient is that of the loss."""
    if output.values is None:
        raise MilesError("the trainer computed no scores; reward_model needs --trainer embedded")
    share = torch.where(batch.mask.bool(), -batch.column("advantages") * output.values, 0.0)
    return Loss((share * batch.column("loss_weight")).sum())


async def attach_scores(handle: LearnerHandle, samples: Sequence[Sample]) -> None:
    """Compute the scores with the weights before the step, and attach them to the samples."""
    for sample, columns in zip(samples, await handle.columns(samples, "old", (SCORES,)), strict=True):
        sample.fields |= columns


async def measure(handle: LearnerHandle, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of -log sigmoid(h) over held-out pairs, and the fraction whose chosen text has the larger score."""
    found = await handle.columns(samples, "old", (SCORES,))
    scores = torch.tensor([float(columns[SCORES][-1]) for columns in found], dtype=torch.float64)
    margin = torch.tensor([float(sample.fields[MARGIN]) for sample in samples[::2]], dtype=torch.float64)
    gap = scores[::2] - scores[1::2]  # a rejected text follows its chosen one
    return {
        "offline/held_out_loss": float(-logsigmoid(gap - margin).mean()),
        "offline/held_out_accuracy": float((gap > 0).double().mean()),
    }
