"""The advantages of SFT, DPO and IPO are the gradients of their losses, computed by autograd from the formulas of the papers."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from miles_core.data import Batch
from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs, Clip, Context, Output, PolicyLossInputs, loss_weights
from miles_offline.dpo import make_dpo
from miles_offline.ipo import make_ipo
from miles_offline.reward_model import MARGIN, SCORES, make_advantage, score_loss
from miles_offline.sft import make_sft

BETA = 0.3
#: Two pairs, whose texts are not adjacent; the first token of each text is its prompt.
LENGTHS, GROUP, REWARD = [4, 3, 5, 6], [7, 9, 9, 7], [1.0, 0.0, 1.0, 0.0]
PAIRS = ((0, 3), (2, 1))
MASK = torch.cat([torch.tensor([0.0] + [1.0] * (n - 1)) for n in LENGTHS])
TOKENS = sum(LENGTHS)


def inputs_of(policy, reference, kl_coef=BETA):
    lengths, group = torch.tensor(LENGTHS), torch.tensor(GROUP)
    index = torch.arange(len(LENGTHS))
    batch = Batch(torch.zeros(TOKENS, dtype=torch.int64), lengths, torch.ones_like(lengths), group, group, index)
    rewards = torch.tensor(REWARD, dtype=torch.float64)
    kl = policy - reference if kl_coef else None
    return AdvantageInputs(rewards, group, group, lengths, MASK, kl=kl, kl_coef=kl_coef, batch=batch)


def texts(values):
    return [(part * mask, mask.sum()) for part, mask in zip(values.split(LENGTHS), MASK.split(LENGTHS), strict=True)]


def dpo(ratios):
    return sum(-logsigmoid(BETA * (ratios[c][0].sum() - ratios[r][0].sum())) for c, r in PAIRS) / len(PAIRS)


def ipo(ratios):
    mean = [part.sum() / count for part, count in ratios]
    return sum((mean[c] - mean[r] - 1 / (2 * BETA)) ** 2 for c, r in PAIRS) / len(PAIRS)


@pytest.mark.parametrize(("objective", "formula"), [(make_dpo(), dpo), (make_ipo(), ipo)], ids=["dpo", "ipo"])
def test_the_advantages_are_the_gradient_of_the_loss(objective, formula):
    random = torch.Generator().manual_seed(0)
    policy = torch.randn(TOKENS, generator=random, dtype=torch.float64).requires_grad_()
    reference = torch.randn(TOKENS, generator=random, dtype=torch.float64)
    loss = formula(texts(policy - reference))
    (expected,) = torch.autograd.grad(loss, policy)

    inputs = inputs_of(policy.detach(), reference)
    advantages = objective(inputs)
    weights = loss_weights(MASK, inputs.lengths, inputs.rollout, "constant", 1)
    own, _ = objective.policy_loss(PolicyLossInputs(policy, policy.detach(), advantages, MASK), Clip())
    (found,) = torch.autograd.grad((own * weights).sum(), policy)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(inputs.batch.scalars["pair_loss"].mean(), loss.detach())


def test_sft_is_the_mean_negative_log_likelihood():
    policy = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1)).requires_grad_()
    objective, inputs = make_sft(), inputs_of(policy.detach(), policy.detach(), 0.0)
    loss, _ = objective.policy_loss(PolicyLossInputs(policy, policy.detach(), objective(inputs), MASK), Clip())
    weights = loss_weights(MASK, inputs.lengths, inputs.rollout, "token_mean")
    torch.testing.assert_close((loss * weights).sum(), -(policy * MASK).sum() / MASK.sum())


def test_a_text_without_its_other_side_is_refused():
    inputs = inputs_of(torch.zeros(TOKENS), torch.zeros(TOKENS))
    inputs.group[0] = 3
    with pytest.raises(MilesError, match="2 chosen and 2 rejected texts do not form pairs"):
        make_dpo()(inputs)


def test_a_rank_without_samples_has_no_advantages():
    none = torch.zeros(0, dtype=torch.int64)
    inputs = AdvantageInputs(torch.zeros(0), none, none, none, torch.zeros(0), kl_coef=BETA)
    assert make_dpo()(inputs).shape == (0,)


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_the_gradient_of_scores_is_that_of_the_loss(center):
    random = torch.Generator().manual_seed(2)
    scores = torch.randn(len(LENGTHS), generator=random, dtype=torch.float64).requires_grad_()
    margins = torch.tensor([0.5, 0.2, 0.2, 0.5], dtype=torch.float64)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    mask = torch.zeros(TOKENS).index_fill(0, ends, 1.0)
    values = torch.full((TOKENS,), 9.0, dtype=torch.float64).index_copy(0, ends, scores)  # others have no effect
    loss = sum(
        -logsigmoid(scores[c] - scores[r] - margins[c]) + center * (scores[c] + scores[r]) ** 2 for c, r in PAIRS
    ) / len(PAIRS)
    (expected,) = torch.autograd.grad(loss, scores)

    inputs = inputs_of(torch.zeros(TOKENS), torch.zeros(TOKENS), 0.0)
    inputs = replace(inputs, mask=mask)
    batch = inputs.batch
    batch.columns |= {"loss_mask": mask, SCORES: values.detach()}
    batch.scalars[MARGIN] = margins
    batch.columns["advantages"] = make_advantage(center)(inputs)
    batch.columns["loss_weight"] = loss_weights(mask, inputs.lengths, inputs.rollout, "constant", 1)
    found = score_loss(Output(values=values), batch, Context("train", (), torch.zeros(0)))
    (gradient,) = torch.autograd.grad(found.value, scores)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(batch.scalars["pair_loss"].mean(), loss.detach())
