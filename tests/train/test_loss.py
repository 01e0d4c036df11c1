"""The policy loss of a micro-batch and the supervised one, on batches made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from miles_core.algorithm.choices import loss_weights
from miles_core.algorithm.ratio import engine_gap
from miles_core.config.load import load
from miles_core.contracts.trainer import Context, Output
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.train.loss import PolicyLoss, supervised_loss

CTX = Context("train", (), torch.zeros(0, dtype=torch.int64))


@pytest.fixture
def batch():
    made = collate(
        [
            Sample(tokens=[1, 2, 3, 4], response_length=2, rollout_log_probs=[-1.0, -2.0], index=0, group_index=0),
            Sample(tokens=[1, 5, 6], response_length=2, loss_mask=[1, 0], rollout_log_probs=[-0.5, 0.0], index=1),
        ]
    )
    made.columns["advantages"] = torch.tensor([0, 0, 1.0, 1.0, 0, -2.0, 0])
    made.columns["loss_weight"] = loss_weights(made.mask, made.lengths, made.rollout, "token_mean")
    return made


def log_probs(values=(0, 0, -1.0, -2.0, 0, -0.5, 0)):
    return torch.tensor(values).requires_grad_()


def loss(batch, current, *flags):
    return PolicyLoss(load(flags).algorithm)(Output(log_probs=current), batch, CTX)


def test_on_policy_the_loss_is_minus_the_weighted_advantage(batch):
    current = log_probs()
    found = loss(batch, current)
    assert found.value.item() == pytest.approx(-(1 + 1 - 2) / 3, abs=1e-6)
    found.value.backward()
    assert current.grad.tolist() == pytest.approx([0, 0, -1 / 3, -1 / 3, 0, 2 / 3, 0])


def test_it_is_clipped_against_the_old_policy(batch):
    batch.columns["old_log_probs"] = torch.tensor([0, 0, -3.0, -2.0, 0, -0.5, 0])
    current = log_probs()
    loss(batch, current, "--eps-clip", "0.2").value.backward()
    assert current.grad[2] == 0 and current.grad[3] != 0


def test_a_correction_multiplies_the_policy_gradient_only(batch):
    batch.columns["ref_log_probs"] = torch.tensor([0, 0, -1.5, -2.0, 0, -0.5, 0])
    batch.columns["correction"] = torch.zeros(7)
    found = loss(batch, log_probs(), "--kl-loss-coef", "0.5", "--kl-loss-type", "k2")
    assert found.value.item() == pytest.approx(0.5 * 0.5 * 0.5**2 / 3)
    total, count = found.metrics["train/ref_kl"]
    assert count == 3 and total > 0


def test_the_mismatch_is_measured_where_nothing_else_computes_old_log_probs(batch):
    total, count = loss(batch, log_probs((0, 0, -1.5, -2.0, 0, -0.5, 9.0))).metrics["mismatch/abs_log_prob"]
    assert total.item() == pytest.approx(0.5) and count == 3
    batch.columns["old_log_probs"] = log_probs().detach()
    assert "mismatch/abs_log_prob" not in loss(batch, log_probs()).metrics


def test_mismatch_estimators():
    found = engine_gap(torch.tensor([-1.0, -5.0]), torch.tensor([-1.5, 0.0]), torch.tensor([1.0, 0.0]))
    assert {name: float(total) for name, (total, _) in found.items()} == pytest.approx(
        {
            "mismatch/abs_log_prob": 0.5,
            "mismatch/abs_log_prob_max": 0.5,
            "mismatch/kl_k1": -0.5,
            "mismatch/kl_k3": 0.1487212707,
            "rollout/entropy": 1.5,
        }
    )


def test_tokens_of_the_trained_weights_are_measured_on_their_own():
    sides = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.0, -2.5, -3.25, 0.0])
    found = engine_gap(*sides, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    pairs = {name: (float(total), float(count)) for name, (total, count) in found.items() if "current" in name}
    assert pairs == {
        "mismatch/current_abs_log_prob": (0.25, 2.0),
        "mismatch/current_abs_log_prob_max": (0.25, 2.0),
        "mismatch/current_kl_k3": (pytest.approx(math.exp(0.25) - 1.25), 2.0),
    }
    assert float(found["mismatch/abs_log_prob_max"][0]) == 0.5


def test_supervised_loss_is_the_mean_negative_log_likelihood(batch):
    found = supervised_loss(Output(log_probs=log_probs()), batch, CTX)
    assert found.value.item() == pytest.approx(3.5 / 3)
    total, count = found.metrics["sft/loss"]
    assert (float(total), float(count)) == (3.5, 3.0)
