"""Keyed sampling: the hash, the inversion, supports and their log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.engine import Sampling
from miles_core.errors import MilesError
from miles_embedded.engine import sampling as draw

_MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """The reference in plain integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def reference_uniform(seed: int, key: int, position: int, stream: int) -> float:
    golden = 0x9E3779B97F4A7C15
    x = splitmix((seed + golden + stream * 0x632BE59B) & _MASK)
    x = splitmix((x + key * golden) & _MASK)
    x = splitmix((x + position * golden) & _MASK)
    return ((x >> 16) + 0.5) * 2.0**-48


@given(
    seed=st.integers(0, 2**64 - 1),
    key=st.integers(0, 2**40),
    position=st.integers(0, 2**20),
    stream=st.integers(0, 100),
)
def test_uniform_equals_integer_arithmetic(seed, key, position, stream):
    got = draw.uniform(seed, torch.tensor([key]), torch.tensor([position]), stream)
    assert got.item() == reference_uniform(seed, key, position, stream)


def test_uniform_is_uniform_and_uncorrelated():
    keys, positions = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    u = draw.uniform(3, keys.reshape(-1), positions.reshape(-1)).view(200, 200)
    counts = torch.histc(u.float(), 20, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 45  # chi2, 19 degrees of freedom, p about 1e-3
    v = draw.uniform(3, keys.reshape(-1), positions.reshape(-1), stream=1).view(200, 200)
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, v)):
        assert abs(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1]) < 0.02


@pytest.mark.parametrize("u", [2.0**-49, 0.5, 1 - 2.0**-49])
@settings(max_examples=50)
@given(weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(lambda w: sum(w) > 1e-3))
def test_pick_never_takes_a_token_of_probability_zero(u, weights):
    probs = torch.tensor([weights])
    token = draw.pick(probs, torch.tensor([u], dtype=torch.float64)).item()
    assert 0 <= token < len(weights) and weights[token] > 0


def test_pick_follows_the_distribution():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    u = draw.uniform(0, torch.arange(40000), torch.zeros(40000, dtype=torch.int64))
    tokens = draw.pick(probs.expand(40000, 4), u)
    share = torch.bincount(tokens, minlength=4).double() / 40000
    torch.testing.assert_close(share, probs.double(), atol=0.01, rtol=0)


def joint_support(logits: np.ndarray, s: Sampling) -> set[int]:
    """The definition, in numpy."""
    p = np.exp(logits.astype(np.float64) / s.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    mass, kept = 0.0, []
    for rank, token in enumerate(order):
        if rank > 0 and ((s.top_k > 0 and rank >= s.top_k) or mass >= s.top_p):
            break
        kept.append(int(token))
        mass += p[token]
    return set(kept)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([-1, 1, 3, 20]),
    top_p=st.floats(0.05, 1.0),
)
def test_distribution_is_the_joint_one(seed, temperature, top_k, top_p):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed)) * 2
    s = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    dist = draw.distribution(logits, draw.params_of([s] * 3))
    for row, log_probs in zip(logits, dist.log_probs, strict=True):
        finite = torch.isfinite(log_probs).nonzero().flatten().tolist()
        support = joint_support(row.numpy(), s) if s.truncated else set(range(20))
        if set(finite) != support:  # a sum in another order may sit on the other side of top_p
            p = (row.double() / temperature).softmax(-1).sort(descending=True).values.cumsum(-1)
            assert (p - top_p).abs().min() < 1e-6
            continue
        expected = (row[finite] / temperature).log_softmax(-1)
        torch.testing.assert_close(log_probs[finite], expected, atol=1e-5, rtol=1e-5)


def test_top_p_of_one_leaves_top_k_its_tokens():
    """The first token's probability is 1 in rounding, and yet two are kept."""
    for parameters in (draw.Params(1.0, 2, 1.0), draw.Params(1.0, torch.tensor([[2]]), torch.tensor([[1.0]]).double())):
        found = draw.distribution(torch.tensor([[60.0, 0.0, -1.0]]), parameters)
        assert found.support.tolist() == [[True, True, False]]


def test_rows_with_different_parameters_equal_each_alone():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    every = [
        Sampling(1),
        Sampling(1, temperature=0.0),
        Sampling(1, temperature=0.5, top_p=0.7),
        Sampling(1, top_k=4),
        Sampling(1, temperature=2.0),
    ]
    mixed = draw.distribution(logits, draw.params_of(every))
    u = draw.uniform(0, torch.arange(5), torch.arange(5))
    together = draw.sample(logits, draw.params_of(every), u, torch.tensor([s.truncated for s in every]))
    for i, s in enumerate(every):
        alone = draw.distribution(logits[i : i + 1], draw.params_of([s]))
        torch.testing.assert_close(mixed.log_probs[i : i + 1], alone.log_probs)
        single = draw.sample(logits[i : i + 1], draw.params_of([s]), u[i : i + 1], torch.tensor([s.truncated]))
        assert together.tokens[i] == single.tokens[0]
        assert together.log_probs[i] == pytest.approx(single.log_probs[0], abs=1e-6)
        assert together.supports is not None
        assert len(together.supports[i]) == (len(single.supports[0]) if s.truncated else 0)


def test_support_contains_the_sampled_token_and_is_sorted():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2))
    u = draw.uniform(0, torch.arange(200), torch.arange(200))
    got = draw.sample(logits, draw.params_of([Sampling(1, top_p=0.6, top_k=10)] * 200), u, torch.ones(200).bool())
    for token, log_prob, support in zip(got.tokens, got.log_probs, got.supports, strict=True):
        assert token in support and list(support) == sorted(support) and 1 <= len(support) <= 10
        assert log_prob <= 0


def test_greedy_is_a_point_mass():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    params = draw.params_of([Sampling(1, temperature=0.0)])
    got = draw.sample(logits, params, torch.tensor([0.9], dtype=torch.float64))
    assert got.tokens == [1] and got.log_probs == [logits.log_softmax(-1)[0, 1].item()]  # at temperature 1
    assert draw.distribution(logits, params).log_probs.tolist() == [[float("-inf"), 0.0, float("-inf"), float("-inf")]]


def test_equal_probabilities_are_ranked_by_id():
    logits = torch.zeros(1, 2000)
    dist = draw.distribution(logits, draw.params_of([Sampling(1, top_k=3)]))
    assert dist.support[0].nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("spread", [1.0, 4.0])  # supports longer and shorter than the head looked at first
def test_a_large_vocabulary_gets_the_same_support(spread):
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * spread
    for s in (Sampling(1, top_p=0.8), Sampling(1, top_p=0.9), Sampling(1, top_k=7)):
        dist = draw.distribution(logits, draw.params_of([s]))
        for row, mask in zip(logits, dist.support, strict=True):
            found = set(mask.nonzero().flatten().tolist())
            assert len(found ^ joint_support(row.numpy(), s)) <= 1  # sums of another order


def test_the_cap_limits_what_is_sampled_and_is_counted():
    logits = torch.linspace(0, 0.1, draw.SUPPORT_CAP + 500).unsqueeze(0)
    got = draw.sample(
        logits,
        draw.params_of([Sampling(1, top_p=0.9999)]),
        torch.tensor([0.01], dtype=torch.float64),
        torch.tensor([True]),
    )
    assert got.capped == [True] and len(got.supports[0]) == draw.SUPPORT_CAP
    assert got.tokens[0] in got.supports[0]


def test_log_probs_are_over_the_full_vocabulary_unless_the_support_is_recorded():
    logits, u = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([0.5], dtype=torch.float64)
    params = draw.params_of([Sampling(1, temperature=0.5, top_k=1)])
    plain, recorded = draw.sample(logits, params, u), draw.sample(logits, params, u, torch.tensor([True]))
    assert plain.tokens == recorded.tokens == [1] and plain.supports is None
    assert plain.log_probs[0] == pytest.approx((logits / 0.5).log_softmax(-1)[0, 1].item())
    assert recorded.log_probs[0] == pytest.approx(0.0)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(MilesError, match="not finite"):
        draw.sample(
            torch.full((1, 4), float("nan")), draw.params_of([Sampling(1)]), torch.tensor([0.5], dtype=torch.float64)
        )
