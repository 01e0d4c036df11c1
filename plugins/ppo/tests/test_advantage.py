"""GAE with rewards per token, compared with a recursion in float64 and with published values."""

import pytest
import torch

from miles_core.data import Sample, collate
from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs
from miles_ppo.metrics import derive, moments
from miles_ppo.ppo import estimate, gae, make_advantage


def inputs_of(masks, rewards, **options):
    """Samples with one prompt token each; ``masks`` are those of their responses."""
    flat = [0.0, *masks[0]]
    for mask in masks[1:]:
        flat += [0.0, *mask]
    ids = torch.arange(len(masks))
    lengths = torch.tensor([1 + len(m) for m in masks])
    return AdvantageInputs(torch.tensor(rewards, dtype=torch.float64), ids, ids, lengths, torch.tensor(flat), **options)


def test_the_golden_values():
    inputs = inputs_of([[1, 1, 1]], [1.0], lam=0.95)
    advantages, returns = estimate(inputs, torch.tensor([9.0, 0.5, 0.4, 0.6]))
    torch.testing.assert_close(advantages[1:], torch.tensor([0.451, 0.58, 0.40]).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(returns[1:], torch.tensor([0.951, 0.98, 1.0]).double(), rtol=0, atol=1e-7)
    assert advantages[0] == returns[0] == 0


def recursion(rewards, values, gamma, lam):
    """Equation 16 as a sum over all later differences, in Python floats."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * v1 - v0 for r, v1, v0 in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_ragged_samples_with_masked_tokens_and_a_kl_in_the_reward():
    random = torch.Generator().manual_seed(3)
    masks = [[1, 0, 0, 1, 1], [1], [0, 1, 1], [0, 0]]
    total = sum(1 + len(m) for m in masks)
    values, kl = torch.randn(total, generator=random), torch.randn(total, generator=random)
    inputs = inputs_of(masks, [0.7, -1.0, 2.0, 5.0], gamma=0.9, lam=0.8, kl=kl, kl_coef=0.3)
    advantages, returns = estimate(inputs, values)
    at = 0
    for mask, reward in zip(masks, [0.7, -1.0, 2.0, 5.0], strict=True):
        trained = [at + 1 + i for i, kept in enumerate(mask) if kept]
        tokens = [-0.3 * kl[i].item() for i in trained]
        if trained:
            tokens[-1] += reward
        expected = dict(zip(trained, recursion(tokens, values[trained].tolist(), 0.9, 0.8), strict=True))
        for i in range(at, at + 1 + len(mask)):
            assert advantages[i].item() == pytest.approx(expected.get(i, 0.0), abs=1e-9)
            wanted = expected[i] + values[i].item() if i in expected else 0.0
            assert returns[i].item() == pytest.approx(wanted, abs=1e-9)
        at += 1 + len(mask)


def test_a_kl_in_the_reward_needs_log_probs():
    with pytest.raises(MilesError, match=r"--kl-coef 0\.1 needs the log-probs of policy and reference at every token"):
        estimate(inputs_of([[1]], [1.0], kl_coef=0.1), torch.zeros(2))


def test_the_returns_become_a_column():
    sample = Sample(tokens=[5, 6, 7], response_length=2, reward=1.0, group_index=0, index=0)
    batch = collate([sample])
    batch.columns["values"] = torch.tensor([0.0, 0.25, 0.5])
    ids = torch.tensor([0])
    inputs = AdvantageInputs(torch.tensor([1.0]), ids, ids, batch.lengths, batch.mask, lam=1.0, batch=batch)
    torch.testing.assert_close(make_advantage()(inputs), torch.tensor([0.0, 0.75, 0.5]).double())
    torch.testing.assert_close(batch.columns["returns"], torch.tensor([0.0, 1.0, 1.0]))


def test_explained_variance_of_a_step_in_two_micro_batches():
    random = torch.Generator().manual_seed(0)
    sums: dict[str, tuple[float, float]] = {}
    returns, values = torch.randn(12, generator=random), torch.randn(12, generator=random)
    for part in (slice(0, 5), slice(5, 12)):
        count = len(returns[part])
        batch = collate([Sample(tokens=[1] * (count + 1), response_length=count, reward=0.0, group_index=0, index=0)])
        batch.columns |= {
            "returns": torch.cat([torch.zeros(1), returns[part]]),
            "values": torch.cat([torch.full((1,), 99.0), values[part]]),
        }
        for name, (total, weight) in moments(batch).items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + float(total), old[1] + float(weight))
    metrics = {f"critic/{name}": total / weight for name, (total, weight) in sums.items()}
    derive(metrics)
    errors = (returns - values).double()
    explained = 1 - errors.var(correction=0) / returns.double().var(correction=0)
    assert metrics == {
        "critic/ppo/returns_std": pytest.approx(returns.double().std(correction=0).item()),
        "critic/ppo/value_error": pytest.approx(errors.square().mean().sqrt().item()),
        "critic/ppo/explained_variance": pytest.approx(explained.item()),
    }


def test_returns_without_variance_have_none_to_explain():
    metrics = {"ppo/returns_mean": 1.0, "ppo/returns_square": 1.0, "ppo/errors_mean": 0.5, "ppo/errors_square": 0.25}
    derive(metrics)
    assert metrics == {"ppo/returns_std": 0.0, "ppo/value_error": 0.5}


def test_gae_golden():
    one = torch.ones(3, dtype=torch.float64)
    advantages, returns = gae(
        torch.tensor([0.0, 0, 1]).double(), torch.tensor([0.5, 0.4, 0.6]).double(), one, torch.tensor([3]), 1.0, 0.95
    )
    torch.testing.assert_close(advantages, torch.tensor([0.451, 0.58, 0.40]).double(), atol=1e-7, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([0.951, 0.98, 1.0]).double(), atol=1e-7, rtol=0)


def test_gae_skips_masked_tokens_and_does_not_leak_between_samples():
    reward = torch.tensor([9.0, 0, 9, 0, 1, 9, 1])
    value = torch.tensor([9.0, 0.5, 9, 0.4, 0.6, 9, 0.25])
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    advantages, returns = gae(reward, value, mask, torch.tensor([5, 2]), 1.0, 0.95)
    torch.testing.assert_close(advantages, torch.tensor([0, 0.451, 0, 0.58, 0.40, 0, 0.75]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([0, 0.951, 0, 0.98, 1.0, 0, 1.0]), atol=1e-6, rtol=0)
