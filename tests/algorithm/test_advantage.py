import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithm.choices import ALGORITHMS
from miles_core.algorithm.objective import AdvantageInputs
from miles_core.algorithm.reinforce_plus_plus import discounted_returns, whiten
from miles_core.errors import ConfigError

GOLDEN_REWARDS = [1.0, 0, 0, 1, 0, 0, 0, 1]
GROUP_ESTIMATORS = [name for name, objective in ALGORITHMS.items() if not objective.kl_in_reward]


def one_token_each(rewards, group=None, rollout=None, dtype=torch.float64, **kwargs):
    n = len(rewards)
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=dtype),
        group=torch.zeros(n, dtype=torch.int64) if group is None else torch.tensor(group),
        rollout=torch.arange(n) if rollout is None else torch.tensor(rollout),
        lengths=torch.ones(n, dtype=torch.int64),
        mask=torch.ones(n, dtype=torch.bool),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("name", "high", "low"),
    [
        ("grpo", 1.2076124, -0.7245674),
        ("gspo", 1.2076124, -0.7245674),
        ("cispo", 1.2076124, -0.7245674),
        ("dr_grpo", 0.625, -0.375),
        ("rloo", 0.7142857, -0.4285714),
    ],
)
def test_golden_values(name, high, low):
    advantages = ALGORITHMS[name](one_token_each(GOLDEN_REWARDS))
    expected = torch.tensor([high if r else low for r in GOLDEN_REWARDS], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, atol=5e-8, rtol=0)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(value=st.floats(-1e6, 1e6, width=32), n=st.integers(1, 9))
@settings(max_examples=25)
def test_equal_rewards_give_exactly_zero(name, dtype, value, n):
    advantages = ALGORITHMS[name](one_token_each([value] * n, dtype=dtype))
    assert advantages.dtype == dtype
    assert torch.equal(advantages, torch.zeros(n, dtype=dtype))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_gives_exactly_zero_beside_others(name):
    advantages = ALGORITHMS[name](one_token_each([5.0, 0.1, 1.1, 0.1], group=[7, 3, 3, 3]))
    assert advantages[0] == 0
    assert (advantages[1:] != 0).all()


def test_one_rollout_cut_into_siblings_is_a_group_of_one():
    assert ALGORITHMS["grpo"](one_token_each([1.0, 0.0], rollout=[4, 4])).tolist() == [0.0, 0.0]


def test_siblings_count_once_in_the_statistics():
    whole = ALGORITHMS["grpo"](one_token_each([1.0, 0.0, 0.5]))
    cut = ALGORITHMS["grpo"](one_token_each([1.0, 1.0, 1.0, 0.0, 0.5], group=[0] * 5, rollout=[0, 0, 0, 1, 2]))
    torch.testing.assert_close(cut, whole[[0, 0, 0, 1, 2]], atol=1e-12, rtol=0)


def test_rloo_is_reward_minus_mean_of_the_others():
    rewards = torch.tensor([0.3, -1.0, 2.5, 0.25], dtype=torch.float64)
    others = torch.stack([rewards[torch.arange(4) != i].mean() for i in range(4)])
    scores = ALGORITHMS["rloo"](one_token_each(rewards.tolist()))
    torch.testing.assert_close(scores, rewards - others, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@given(data=st.data())
@settings(max_examples=25)
def test_permuting_samples_permutes_advantages(name, data):
    n = data.draw(st.integers(2, 12))
    rewards = data.draw(st.lists(st.floats(-10, 10), min_size=n, max_size=n))
    group = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    plain = ALGORITHMS[name](one_token_each(rewards, group))
    permuted = ALGORITHMS[name](
        one_token_each([rewards[i] for i in order], [group[i] for i in order], rollout=[int(i) for i in order])
    )
    # The GRPO quotient of nearly equal rewards amplifies the last bit of the mean by up to 1 / 1e-6.
    torch.testing.assert_close(permuted, plain[list(order)], atol=1e-7, rtol=1e-7)


def test_scores_are_spread_over_unmasked_tokens_only():
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        group=torch.zeros(2, dtype=torch.int64),
        rollout=torch.arange(2),
        lengths=torch.tensor([3, 2]),
        mask=torch.tensor([0, 1, 1, 0, 1]),
    )
    assert ALGORITHMS["dr_grpo"](inputs).tolist() == [0.0, 0.5, 0.5, 0.0, -0.5]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_kl_in_the_reward_is_refused_where_it_would_be_ignored(name):
    with pytest.raises(ConfigError, match=r"--kl-coef 0\.1 .*--kl-loss-coef"):
        ALGORITHMS[name](one_token_each([1.0, 0.0], kl=torch.zeros(2), kl_coef=0.1))


def test_a_rollout_in_two_groups_is_refused():
    with pytest.raises(ValueError, match="two groups"):
        ALGORITHMS["grpo"](one_token_each([1.0, 0.0], group=[0, 1], rollout=[0, 0]))


def test_columns_of_wrong_length_are_refused():
    with pytest.raises(ValueError, match="mask has 3 tokens, lengths add up to 2"):
        dataclasses.replace(one_token_each([1.0, 0.0]), mask=torch.ones(3))


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns_against_the_definition(gamma):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 0, 7, 1])
    rewards = torch.randn(12, generator=generator, dtype=torch.float64)
    mask = torch.rand(12, generator=generator) < 0.6
    expected = torch.zeros(12, dtype=torch.float64)
    start = 0
    for length in lengths.tolist():
        kept = [t for t in range(start, start + length) if mask[t]]
        for i, t in enumerate(kept):
            expected[t] = sum(gamma ** (j - i) * rewards[kept[j]] for j in range(i, len(kept)))
        start += length
    torch.testing.assert_close(discounted_returns(rewards, mask, lengths, gamma), expected, atol=1e-12, rtol=0)


def reinforce_inputs(**kwargs):
    defaults = {
        "rewards": torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64),
        "group": torch.tensor([0, 0, 1]),
        "rollout": torch.arange(3),
        "lengths": torch.tensor([4, 3, 3]),
        "mask": torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0, 0]),
        "kl": torch.tensor([5.0, 0.1, 0.2, 5, 5, 0.3, -0.4, 5, 5, 5], dtype=torch.float64),
        "gamma": 0.9,
        "kl_coef": 0.5,
    }
    return AdvantageInputs(**{**defaults, **kwargs})


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("reinforce_plus_plus", [1.0, -0.5]), ("reinforce_plus_plus_baseline", [0.75, -0.75])],
)
def test_reinforce_plus_plus_against_the_formula(name, rewards):
    first = [-0.5 * 0.1 + 0.9 * (-0.5 * 0.2 + rewards[0]), -0.5 * 0.2 + rewards[0]]
    second = [-0.5 * 0.3 + 0.9 * (0.5 * 0.4 + rewards[1]), 0.5 * 0.4 + rewards[1]]
    returns = torch.tensor(first + second, dtype=torch.float64)
    expected = torch.zeros(10, dtype=torch.float64)
    expected[[1, 2, 5, 6]] = (returns - returns.mean()) / (returns.var(unbiased=True) + 1e-8).sqrt()
    torch.testing.assert_close(ALGORITHMS[name](reinforce_inputs()), expected, atol=1e-12, rtol=0)


def test_reinforce_plus_plus_needs_the_kl_it_is_asked_to_use():
    with pytest.raises(ValueError, match="kl is missing"):
        ALGORITHMS["reinforce_plus_plus"](reinforce_inputs(kl=None))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(0, 2**20))
@settings(max_examples=50)
def test_whitened_over_ranks_equals_whitened_at_once(values, bits):
    column = torch.tensor(values, dtype=torch.float64)
    mask = torch.tensor([(bits >> i) & 1 for i in range(len(values))], dtype=torch.bool)
    whole = whiten(column, mask)
    cut = len(values) // 2
    parts = [slice(0, cut), slice(cut, None)]
    keep = [mask[p] for p in parts]
    total = float(mask.sum())
    mean = float(torch.where(mask, column, 0.0).sum()) / max(total, 1.0)
    squares = float(torch.where(mask, column - mean, 0.0).square().sum())
    for p, k in zip(parts, keep, strict=True):
        answers = iter([total, total * mean, squares])
        part = whiten(column[p], k, sum=lambda _, answers=answers: torch.tensor(next(answers), dtype=torch.float64))
        torch.testing.assert_close(part, whole[p], atol=1e-9, rtol=1e-9)


def test_whiten_uses_the_unbiased_variance():
    out = whiten(torch.tensor([1.0, 2.0, 4.0, 99.0]).double(), torch.tensor([1, 1, 1, 0]))
    x = torch.tensor([1.0, 2.0, 4.0]).double()
    torch.testing.assert_close(out[:3], (x - x.mean()) / math.sqrt(float(x.var()) + 1e-8), atol=1e-12, rtol=0)
    assert out[3] == 0


@pytest.mark.parametrize("mask", [[0, 0], [1, 0]])
def test_whitening_fewer_than_two_tokens_is_zero(mask):
    assert whiten(torch.tensor([3.0, 4.0]), torch.tensor(mask)).tolist() == [0.0, 0.0]
