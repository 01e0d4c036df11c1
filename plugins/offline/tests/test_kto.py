"""KTO: the advantages are the gradient of its loss, and the reference is that of mismatched rows of the step."""

import asyncio

import numpy as np
import pytest
import torch

from miles_core.data import Batch, Sample
from miles_core.trainer import AdvantageInputs, Clip, PolicyLossInputs, loss_weights
from miles_offline.kto import REFERENCE, attach_reference, make_advantage, mismatch

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.5, 0.7
#: Three answers of different lengths; the first token of each text is its prompt.
LENGTHS, LABELS = [4, 3, 6], [1.0, 0.0, 1.0]
MASK = torch.cat([torch.tensor([0.0] + [1.0] * (n - 1)) for n in LENGTHS])


def kto(policy, reference, estimate):
    """The loss of the paper, from log-probabilities [tokens] and the mean log-ratio of mismatched texts."""
    z = max(0.0, estimate)
    losses = []
    for ratio, label in zip(((policy - reference) * MASK).split(LENGTHS), LABELS, strict=True):
        h = BETA * (ratio.sum() - z)
        losses.append(DESIRABLE * (1 - torch.sigmoid(h)) if label else UNDESIRABLE * (1 - torch.sigmoid(-h)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("z", [0.0, 1.7])
def test_the_advantages_are_the_gradient_of_the_loss(z):
    random = torch.Generator().manual_seed(0)
    policy = torch.randn(sum(LENGTHS), generator=random, dtype=torch.float64).requires_grad_()
    reference = torch.randn(sum(LENGTHS), generator=random, dtype=torch.float64)
    loss = kto(policy, reference, z)
    (expected,) = torch.autograd.grad(loss, policy)

    lengths, index = torch.tensor(LENGTHS), torch.arange(len(LENGTHS))
    batch = Batch(torch.zeros(len(MASK), dtype=torch.int64), lengths, torch.ones_like(lengths), index, index, index)
    batch.scalars[REFERENCE] = torch.full((len(LENGTHS),), z, dtype=torch.float64)
    kl = (policy - reference).detach()
    inputs = AdvantageInputs(torch.tensor(LABELS), index, index, lengths, MASK, kl=kl, kl_coef=BETA, batch=batch)
    objective = make_advantage(DESIRABLE, UNDESIRABLE)
    advantages = objective(inputs)
    weights = loss_weights(MASK, lengths, index, "constant", 1)
    own, _ = objective.policy_loss(PolicyLossInputs(policy, policy.detach(), advantages, MASK), Clip())
    (found,) = torch.autograd.grad((own * weights).sum(), policy)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(batch.scalars["kto_loss"].mean(), loss.detach())


def texts():
    """Three samples; the second answer has a token that is not trained."""
    parts = (([1, 2], [3, 4], [1, 1]), ([5], [6, 7, 8], [1, 0, 1]), ([9, 10, 11], [12], [1]))
    return [Sample(tokens=[*p, *a], response_length=len(a), loss_mask=m) for p, a, m in parts]


def test_every_prompt_is_read_with_the_answer_before_it():
    found = [(list(text.tokens), list(text.mask)) for text in mismatch(texts(), None)]
    assert found == [([1, 2, 12], [1]), ([5, 3, 4], [1, 1]), ([9, 10, 11, 6, 7, 8], [1, 0, 1])]


def test_a_mismatched_text_is_cut_at_the_context():
    last = mismatch(texts(), 5)[-1]
    assert (list(last.tokens), last.response_length, list(last.mask)) == ([9, 10, 11, 6, 7], 2, [1, 0])


class Learner:
    """Log-probabilities of a token: its id times a slope of the weights."""

    def __init__(self, slope):
        self.slope = slope

    async def columns(self, samples, kind, wanted):
        slope = self.slope if kind == "old" else 0.0
        answers = [sample.tokens[sample.prompt_length :] for sample in samples]
        return [{"log_probs": np.array(answer, dtype=np.float32) * slope} for answer in answers]


@pytest.mark.parametrize(("slope", "z"), [(0.1, 0.1 * (12 + 3 + 4 + 6 + 8) / 3), (-0.1, 0.0)])
def test_the_reference_is_the_positive_mean_of_the_mismatched_log_ratios(slope, z):
    samples = texts()
    asyncio.run(attach_reference(Learner(slope), samples, None))
    assert [float(sample.fields[REFERENCE]) for sample in samples] == pytest.approx([z] * 3)
