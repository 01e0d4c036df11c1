import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithm.choices import REDUCTIONS, loss_weights
from miles_core.errors import ConfigError

LOSSES = torch.tensor([1.0, 2, 1, 1, 1, 4])
LENGTHS = torch.tensor([2, 4])


@pytest.mark.parametrize(
    ("how", "expected"), [("token_mean", 1.6666667), ("rollout_mean", 1.625), ("constant", (3 + 7) / (2 * 8))]
)
def test_golden(how, expected):
    weights = loss_weights(torch.ones(6), LENGTHS, torch.arange(2), how, constant_length=8)
    assert float((LOSSES * weights).sum()) == pytest.approx(expected, abs=1e-6)


def test_siblings_count_as_one_rollout():
    weights = loss_weights(torch.ones(6), LENGTHS, torch.tensor([5, 5]))
    assert weights.tolist() == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("how", REDUCTIONS)
def test_an_all_masked_sample_is_finite_and_stays_in_the_count(how):
    mask = torch.tensor([0, 0, 1, 0, 1, 1])
    weights = loss_weights(mask, LENGTHS, torch.arange(2), how, constant_length=4)
    per_token = {"rollout_mean": 1 / (3 * 2), "token_mean": 1 / 3, "constant": 1 / (4 * 2)}[how]
    assert weights.tolist() == pytest.approx([0, 0, per_token, 0, per_token, per_token])


@pytest.mark.parametrize("how", REDUCTIONS)
def test_a_step_without_any_unmasked_token_is_zero(how):
    weights = loss_weights(torch.zeros(6), LENGTHS, torch.arange(2), how, constant_length=4)
    assert weights.tolist() == [0.0] * 6


@pytest.mark.parametrize("how", REDUCTIONS)
@given(data=st.data())
@settings(max_examples=30)
def test_the_step_does_not_depend_on_ranks_or_order(how, data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=8))
    rollouts = torch.arange(len(lengths)) // data.draw(st.integers(1, 3))
    total = sum(lengths)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=torch.bool)
    losses = torch.arange(1.0, total + 1).double()
    whole = loss_weights(mask, torch.tensor(lengths), rollouts, how, 7)
    expected = (losses * whole).sum()

    samples = [chunk.tolist() for chunk in torch.arange(total).split(lengths)]
    ranks = [[i for i in range(len(lengths)) if int(rollouts[i]) % 2 == rank] for rank in (0, 1)]
    ranks = [data.draw(st.permutations(rank)) if rank else rank for rank in ranks]
    columns = [[t for i in rank for t in samples[i]] for rank in ranks]
    if how == "token_mean":
        reduced = mask.sum().double()
    else:
        reduced = torch.tensor(float(len(rollouts.unique())), dtype=torch.float64)
    got = torch.zeros((), dtype=torch.float64)
    for rank, column in zip(ranks, columns, strict=True):
        lengths_here = torch.tensor([lengths[i] for i in rank], dtype=torch.int64)
        weights = loss_weights(mask[column], lengths_here, rollouts[list(rank)], how, 7, sum=lambda _: reduced)
        assert torch.equal(weights, whole[column])
        got += (losses[column] * weights).sum()
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


def test_wrong_choices_are_refused():
    with pytest.raises(ConfigError, match=r"'sum'.*rollout_mean, token_mean, constant"):
        loss_weights(torch.ones(6), LENGTHS, torch.arange(2), "sum")
    with pytest.raises(ConfigError, match="at least 1 token, got None"):
        loss_weights(torch.ones(6), LENGTHS, torch.arange(2), "constant")
