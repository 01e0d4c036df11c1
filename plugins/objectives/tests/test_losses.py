"""Each loss and its gradient, compared with formulas written in Python floats and finite differences."""

import math
from types import SimpleNamespace

import pytest
import torch

from miles_core.trainer import AdvantageInputs, Clip, PolicyLossInputs
from miles_objectives import dppo, dro, gmpo, sapo
from miles_objectives.config import ObjectivesConfig
from miles_objectives.gdpo import gdpo

#: Three responses of 3, 1 and 4 tokens, with two tokens that are not trained.
OWNER = [0, 0, 0, 1, 2, 2, 2, 2]
MASK = [1, 1, 0, 1, 1, 1, 1, 0]
NOW = [-0.2, -2.5, -9.0, -0.05, -1.7, -0.9, -4.0, -1.0]
OLD = [-0.9, -2.0, -1.0, -0.4, -1.5, -2.9, -1.2, -7.0]
ADVANTAGE = [1.2, 1.2, 1.2, -0.7, -1.1, -1.1, -1.1, -1.1]


def gmpo_reference(now, i):
    rows = [t for t in range(8) if OWNER[t] == OWNER[i] and MASK[t]]
    bounded = [min(now[t] - OLD[t], 0.4) if ADVANTAGE[i] > 0 else max(now[t] - OLD[t], -0.4) for t in rows]
    return -ADVANTAGE[i] * math.prod(math.exp(b) for b in bounded) ** (1 / len(rows))


def sapo_reference(now, i):
    tau = 1.3 if ADVANTAGE[i] > 0 else 0.8
    return -ADVANTAGE[i] * 4 / tau / (1 + math.exp(-tau * (math.exp(now[i] - OLD[i]) - 1)))


def dppo_reference(kind, delta, at):
    """The mask depends on where the policy is (``at``), not on where a finite difference moves it."""

    def reference(now, i):
        p, q = math.exp(at[i]), math.exp(OLD[i])
        far = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        away = (p > q) if ADVANTAGE[i] > 0 else (p < q)
        return 0.0 if far > delta and away else -ADVANTAGE[i] * math.exp(now[i] - OLD[i])

    return reference


def dro_reference(now, i):
    return -ADVANTAGE[i] * now[i] + 0.15 * (now[i] - OLD[i]) ** 2


CASES = {
    "gmpo": (gmpo.make_loss(0.4), gmpo_reference),
    "sapo": (sapo.make_loss(1.3, 0.8), sapo_reference),
    "dppo tv": (dppo.make_loss("tv", 0.15), dppo_reference("tv", 0.15, NOW)),
    "dppo kl": (dppo.make_loss("kl", 0.05), dppo_reference("kl", 0.05, NOW)),
    "dro": (dro.make_loss(0.3), dro_reference),
}


def inputs_of(now):
    kinds = {"mask": MASK, "segments": OWNER}
    ints = {name: torch.tensor(column) for name, column in kinds.items()}
    return PolicyLossInputs(
        now, torch.tensor(OLD, dtype=torch.float64), torch.tensor(ADVANTAGE, dtype=torch.float64), **ints
    )


@pytest.mark.parametrize(("loss", "reference"), CASES.values(), ids=CASES)
def test_values_and_gradients(loss, reference):
    now = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    found, metrics = loss(inputs_of(now), Clip())
    expected = [reference(NOW, i) if MASK[i] else 0.0 for i in range(8)]
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-9, atol=1e-12)
    found.sum().backward()
    for t in range(8):
        step = 1e-6
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * (i == t) for i, x in enumerate(NOW)]
            ends.append(sum(reference(moved, i) for i in range(8) if MASK[i]))
        assert now.grad[t].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)
    for total, weight in metrics.values():
        assert weight == 6 and torch.isfinite(total)


@pytest.mark.parametrize(("loss", "reference"), CASES.values(), ids=CASES)
def test_masked_tokens_and_extreme_ratios_are_finite(loss, reference):
    now = torch.tensor(
        [-80.0, -0.5, -math.inf, -0.0, -1.7, -90.0, -4.0, math.nan], dtype=torch.float64, requires_grad=True
    )
    found, _ = loss(inputs_of(now), Clip())
    found.sum().backward()
    assert found.isfinite().all() and now.grad.isfinite().all()
    assert found[2] == found[7] == now.grad[2] == now.grad[7] == 0


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (gmpo.make_gmpo, "gmpo_clip", (0.1, 0.4)),
        (sapo.make_sapo, "sapo_tau_positive", (1.0, 3.0)),
        (sapo.make_sapo, "sapo_tau_negative", (1.0, 3.0)),
        (dppo.make_dppo, "dppo_divergence", ("tv", "kl")),
        (dppo.make_dppo, "dppo_threshold", (0.4, 0.9)),
        (dro.make_dro, "dro_beta", (0.3, 3.0)),
    ],
)
def test_each_option_reaches_its_loss(make, name, values):
    def compute(value):
        # the first token's probability rises by 0.412, which is a divergence (kl) of 0.418
        options = ObjectivesConfig(**{"dppo_threshold": 0.415, name: value})
        config = SimpleNamespace(plugin=lambda plugin: options)
        objective = make(SimpleNamespace(config_of=lambda policy: config), None)
        return objective.policy_loss(inputs_of(torch.tensor(NOW, dtype=torch.float64)), Clip())[0]

    assert not torch.equal(*map(compute, values))


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_default_thresholds_of_dppo(kind):
    """From 0.5, the probability 0.64 is 0.14 (tv) and 0.041 (kl) away, and 0.66 is 0.16 and 0.055 away."""
    ends = torch.tensor([0.64, 0.66], dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.int64)
    inputs = PolicyLossInputs(ends.log(), half.log(), 2 * half, mask=ones, segments=torch.arange(2))
    loss, _ = dppo.make_loss(kind)(inputs, Clip())
    torch.testing.assert_close(loss.tolist(), [-1.28, 0.0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["gmpo", "sapo", "dppo tv", "dro"])
def test_at_the_old_policy_the_gradient_is_the_plain_policy_gradient(name):
    now = torch.tensor(OLD, dtype=torch.float64, requires_grad=True)
    CASES[name][0](inputs_of(now), Clip())[0].sum().backward()
    torch.testing.assert_close(
        now.grad, -torch.tensor(ADVANTAGE, dtype=torch.float64) * torch.tensor(MASK), rtol=1e-9, atol=1e-12
    )


def test_gdpo_against_float64():
    rewards = [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 0.0], [5.0, 1.0], [5.0, 3.0]]
    groups, lengths = [0, 0, 0, 0, 1, 1], [2, 3, 1, 2, 2, 1]
    weights = {"a": 1.0, "b": 0.5}
    total = [0.0] * 6
    for k, weight in enumerate(weights.values()):
        for group in (0, 1):
            rows = [i for i in range(6) if groups[i] == group]
            values = [rewards[i][k] for i in rows]
            mean = sum(values) / len(values)
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            for i in rows:
                total[i] += weight * (rewards[i][k] - mean) / (std + 1e-6) if std else 0.0
    mean = sum(total) / 6
    std = math.sqrt(sum((x - mean) ** 2 for x in total) / 5)
    mask = torch.tensor([0.0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1])
    inputs = AdvantageInputs(
        torch.zeros(6).double(), torch.tensor(groups), torch.arange(6), torch.tensor(lengths), mask
    )
    found = gdpo(inputs, torch.tensor(rewards), weights)
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    expected = [(total[i] - mean) / (std + 1e-6) * kept for i, kept in zip(owner, mask.tolist(), strict=True)]
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-9, atol=1e-12)
