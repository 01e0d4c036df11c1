"""The loss of a micro-batch and its gradient against formulas in float64."""

from types import SimpleNamespace

import pytest
import torch

from miles_core.trainer import Loss, Output
from miles_distillation.config import DistillationConfig
from miles_distillation.hooks import Distillation, make_advantage

TOKENS, VOCABULARY, COEF = 7, 13, 0.3


@pytest.fixture
def data():
    """Logits of a student, log-probabilities of two teachers, the sampled tokens, and the other columns of a batch."""
    draw = torch.Generator().manual_seed(1)
    logits, first, second, old = torch.randn(4, TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    return SimpleNamespace(
        logits=logits.requires_grad_(),
        teachers=[first.log_softmax(-1), second.log_softmax(-1)],
        tokens=torch.randint(VOCABULARY, (TOKENS, 1), generator=draw),
        old=old.log_softmax(-1),
        mask=torch.tensor([1.0, 1, 0, 1, 1, 0, 1]),
        weight=torch.rand(TOKENS, generator=draw),
        correction=torch.rand(TOKENS, generator=draw),
    )


def find_loss(data, inner, estimator, columns, candidates=None, **options):
    """The plugin's loss around ``inner``, with float32 inputs as in a trainer."""
    policy = SimpleNamespace(role="train")
    run = SimpleNamespace(
        config_of=lambda policy: SimpleNamespace(algorithm=SimpleNamespace(advantage_estimator=estimator))
    )
    own = data.logits.float().log_softmax(-1)
    output = Output(log_probs=own.gather(-1, data.tokens)[:, 0])
    if candidates is not None:
        output.candidate_log_probs = own.gather(-1, candidates)
    columns = {name: column.float() for name, column in columns.items()} | {"loss_weight": data.weight}
    batch = SimpleNamespace(mask=data.mask, columns=columns, column=columns.__getitem__)
    wrap = Distillation(DistillationConfig(**options)).wrap_loss(run, policy)
    return wrap(lambda *_: inner(output))(output, batch, None)


def rewards(output):
    return Loss(output.log_probs.sum() * 0.5, {"train/other": (torch.tensor(1.0), torch.tensor(1.0))})


def check(found, expected, data):
    (gradient,) = torch.autograd.grad(found.value, data.logits, retain_graph=True)
    (right,) = torch.autograd.grad(expected, data.logits)
    torch.testing.assert_close(found.value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics["train/loss"][0], found.value.detach())


@pytest.mark.parametrize("corrected", [False, True])
def test_rewards_and_the_sampled_divergence(data, corrected):
    own = data.logits.log_softmax(-1).gather(-1, data.tokens)[:, 0]
    old = data.old.gather(-1, data.tokens)[:, 0]
    teacher = sum(w * t.gather(-1, data.tokens)[:, 0] for w, t in zip((0.25, 0.75), data.teachers, strict=True))
    columns = {"teacher_log_probs": teacher, "old_log_probs": old}
    columns |= {"correction": data.correction} if corrected else {}
    found = find_loss(data, rewards, "grpo", columns, coef=COEF)
    gap = (own - teacher).detach()
    factor = data.correction.double() if corrected else 1.0
    term = ((own - old).exp() * gap * factor * data.mask * data.weight).sum()
    check(found, 0.5 * own.sum() + COEF * term, data)
    total, count = found.metrics["distillation/reverse_kl"]
    torch.testing.assert_close(total.double(), (gap * data.mask).sum(), rtol=1e-5, atol=1e-6)
    assert count == data.mask.sum() and "train/other" in found.metrics


@pytest.mark.parametrize("estimator", ["grpo", "distillation"])
def test_the_divergence_over_the_tops_of_two_teachers(data, estimator):
    own, k, weights = data.logits.log_softmax(-1), 3, (1.0, 3.0)
    best = [teacher.topk(k) for teacher in data.teachers]
    columns = {"teacher_log_probs": data.teachers[0].gather(-1, data.tokens)[:, 0]}
    columns["teacher_top_log_probs"] = torch.cat([b.values for b in best], -1)
    candidates = torch.cat([b.indices for b in best], -1)
    options = {"coef": COEF if estimator == "grpo" else 1.0, "top_k": k, "weights": weights}
    found = find_loss(data, rewards, estimator, columns, candidates, **options)
    term = torch.zeros(TOKENS, dtype=torch.float64)
    for weight, teacher, top in zip(weights, data.teachers, best, strict=True):
        p, q = (x.exp().gather(-1, top.indices) for x in (own, teacher))
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        term = term + weight / sum(weights) * (p * (p / q).log()).sum(-1)
    expected = (term * data.mask * data.weight).sum()
    if estimator == "grpo":
        expected = 0.5 * own.gather(-1, data.tokens).sum() + COEF * expected
    check(found, expected, data)
    mass, count = found.metrics["distillation/top_k_mass"]
    exact = (own.detach().exp().gather(-1, best[0].indices).sum(-1) * data.mask).sum() / data.mask.sum()
    assert float(mass / count) == pytest.approx(float(exact), rel=1e-5)


def test_the_advantage_is_the_negative_gap(data):
    columns = {"old_log_probs": data.old[:, 0].float(), "teacher_log_probs": data.teachers[0][:, 0].float()}
    inputs = SimpleNamespace(mask=data.mask, batch=SimpleNamespace(column=columns.__getitem__))
    expected = (data.teachers[0][:, 0] - data.old[:, 0]) * data.mask
    torch.testing.assert_close(make_advantage()(inputs).double(), expected, rtol=1e-5, atol=1e-6)
