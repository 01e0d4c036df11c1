"""Each named loss and its gradient are those of a formula in float64, one token at a time."""

import math

import numpy as np
import pytest
import torch

from miles_core.contracts.trainer import Context, Output
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.train.named_losses import LOSS_FIELDS, LOSS_SUM, NamedLoss, evaluate

#: loss -> (settings, value of a token, derivative by log p), of log p, log q, A.
FORMULAS = {
    "cross_entropy": ({}, lambda p, q, a: -p, lambda p, q, a: -1.0),
    "importance_sampling": ({}, lambda p, q, a: -math.exp(p - q) * a, lambda p, q, a: -math.exp(p - q) * a),
    "ppo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
        lambda p, q, a: -min(math.exp(p - q) * a, min(max(math.exp(p - q), 0.9), 1.3) * a),
        lambda p, q, a: (
            0.0 if (math.exp(p - q) > 1.3 and a > 0) or (math.exp(p - q) < 0.9 and a < 0) else -math.exp(p - q) * a
        ),
    ),
    "cispo": (
        {},
        lambda p, q, a: -min(max(math.exp(p - q), 0.8), 1.2) * p * a,
        lambda p, q, a: -min(max(math.exp(p - q), 0.8), 1.2) * a,
    ),
    "dro": (
        {"beta": 0.3},
        lambda p, q, a: -(p * a - 0.15 * (p - q) ** 2),
        lambda p, q, a: -(a - 0.3 * (p - q)),
    ),
}


def make(seed=0, old=True):
    random = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate((3, 5, 4)):
        fields = {"advantages": random.normal(size=length), "loss_weight": random.normal(size=length)}
        if old:
            fields["old_log_probs"] = -random.exponential(1.0, length)
        mask = [1] * (length - 1) + [index % 2]
        samples.append(
            Sample(tokens=[5] * (length + 2), response_length=length, loss_mask=mask, index=index, fields=fields)
        )
    return samples


def computed(samples, name, settings, seed=1):
    batch = collate(samples, LOSS_FIELDS)
    current = torch.from_numpy(-np.random.default_rng(seed).exponential(1.0, len(batch.tokens))).float()
    current = torch.where(batch.mask.bool(), current, 0.0).requires_grad_()
    found = NamedLoss(name, settings)(Output(log_probs=current), batch, Context("train", (), torch.arange(0)))
    found.value.backward()
    return batch, current, found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_formula(name, seed):
    settings, value, slope = FORMULAS[name]
    samples = make(seed)
    batch, current, found = computed(samples, name, settings, seed)
    expected, gradient = 0.0, []
    columns = [batch.column(c).double().tolist() for c in ("old_log_probs", "advantages", "loss_weight", "loss_mask")]
    for p, q, a, weight, mask in zip(current.detach().double().tolist(), *columns, strict=True):
        weight = weight if mask else 0.0
        expected += weight * value(p, q, a)
        gradient.append(weight * slope(p, q, a))
    assert float(found.metrics[LOSS_SUM][0]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(current.grad.double().numpy(), gradient, rtol=1e-5, atol=1e-6)
    parts = [
        current.detach().numpy()[s + 2 : s + n]
        for s, n in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    ]
    assert evaluate(samples, parts, NamedLoss(name, settings)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_without_old_log_probs_the_policy_is_its_own_old_policy(name):
    settings = FORMULAS[name][0]
    batch, current, _ = computed(make(old=False), name, settings)
    scale = batch.column("advantages") * batch.column("loss_weight") * batch.mask
    np.testing.assert_allclose(current.grad.numpy(), -scale.numpy(), rtol=1e-5, atol=1e-6)
