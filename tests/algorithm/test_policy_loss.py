import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithm import cispo, grpo, gspo
from miles_core.algorithm.choices import ALGORITHMS, REDUCTIONS, loss_weights
from miles_core.algorithm.objective import Clip, PolicyLossInputs
from miles_core.errors import ConfigError

POLICY_LOSSES = {name: ALGORITHMS[name].policy_loss for name in ("grpo", "gspo", "cispo")}
LOG_RATIO = [0.1, -0.3, 0.5, -1.0]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0]


def golden_inputs(log_ratio=LOG_RATIO, advantages=ADVANTAGES, **kwargs):
    column = torch.tensor(log_ratio, dtype=torch.float64)
    defaults = {
        "log_probs": (column - 2.0).requires_grad_(),
        "old_log_probs": torch.full_like(column, -2.0),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "mask": torch.ones(len(log_ratio), dtype=torch.bool),
        "segments": torch.zeros(len(log_ratio), dtype=torch.int64),
    }
    return PolicyLossInputs(**{**defaults, **kwargs})


@pytest.mark.parametrize(("eps_high", "third"), [(0.2, -1.2), (0.28, -1.28)])
def test_ppo_golden(eps_high, third):
    loss, metrics = grpo.policy_loss(golden_inputs(), Clip(0.2, eps_high))
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.105171, 0.8, third, 0.8]).double(), atol=5e-7, rtol=0)
    assert metrics["clip_fraction_high"] == (1, 4)
    assert metrics["clip_fraction_low"] == (2, 4)


def test_ppo_gradient_stops_where_clipped():
    inputs = golden_inputs()
    grpo.policy_loss(inputs, Clip(0.2))[0].sum().backward()
    expected = torch.tensor([-(2.718281828459045**0.1), 0.0, 0.0, 0.0]).double()
    torch.testing.assert_close(inputs.log_probs.grad, expected, atol=1e-6, rtol=0)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    inputs = golden_inputs(log_ratio=[2.0, 2.0, 0.5], advantages=[-1.0, 1.0, -2.0])
    loss, metrics = grpo.policy_loss(inputs, Clip(0.2, 0.2, dual=3.0))
    expected = torch.tensor([3.0, -1.2, 2 * 1.6487212707], dtype=torch.float64)
    torch.testing.assert_close(loss.detach(), expected, atol=1e-9, rtol=0)
    assert metrics["clip_fraction_dual"] == (1, 3)
    loss.sum().backward()
    assert inputs.log_probs.grad[0] == 0
    assert inputs.log_probs.grad[2] != 0


def test_gspo_golden_ratio():
    loss, metrics = gspo.policy_loss(golden_inputs(advantages=[1.0] * 4), Clip(10.0))
    torch.testing.assert_close(loss.detach(), torch.full((4,), -0.839457).double(), atol=5e-7, rtol=0)
    total, count = metrics["ratio"]
    assert float(total / count) == pytest.approx(0.839457, abs=5e-7)


@given(
    st.lists(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
@settings(max_examples=30)
def test_gspo_value_and_gradient_against_the_formula_per_sequence(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.tensor([x for s in samples for x in s], dtype=torch.float64)
    segments = torch.tensor([i for i, s in enumerate(samples) for _ in s])
    mask = torch.rand(len(flat), generator=generator) < 0.7
    score = torch.randn(len(samples), generator=generator, dtype=torch.float64)
    old = torch.randn(len(flat), generator=generator, dtype=torch.float64)
    log_probs = (old + flat).requires_grad_()
    loss, _ = gspo.policy_loss(PolicyLossInputs(log_probs, old, score[segments], mask, segments), Clip(0.2, 0.3))
    loss.sum().backward()

    reference = log_probs.detach().clone().requires_grad_()
    total = reference.new_zeros(())
    for i in range(len(samples)):
        kept = mask & (segments == i)
        if not kept.any():
            continue
        s = (reference - old)[kept].mean().exp()
        total = total + kept.sum() * torch.maximum(-score[i] * s, -score[i] * s.clamp(0.8, 1.3))
    torch.testing.assert_close(loss.detach().sum(), total.detach(), atol=1e-10, rtol=1e-10)
    if total.requires_grad:
        total.backward()
        torch.testing.assert_close(log_probs.grad, reference.grad, atol=1e-10, rtol=1e-10)


def test_gspo_does_not_depend_on_other_samples_of_the_micro_batch():
    generator = torch.Generator().manual_seed(1)
    segments = torch.tensor([0, 0, 0, 1, 1, 2])
    columns = torch.randn(3, 6, generator=generator)
    mask = torch.tensor([1, 0, 1, 1, 1, 0])

    def losses(keep):
        column = columns[:, keep]
        inputs = PolicyLossInputs(column[0], column[1], column[2], mask[keep], segments[keep])
        return gspo.policy_loss(inputs, Clip(0.2))[0]

    whole = losses(torch.arange(6))
    parts = torch.cat([losses(torch.tensor(part)) for part in ([0, 1, 2], [3, 4], [5])])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@given(cuts=st.sets(st.integers(1, 4)), seed=st.integers(0, 2**31))
@settings(max_examples=10)
def test_loss_and_gradient_of_a_step_do_not_depend_on_the_micro_batches(how, name, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 1, 4, 2, 5])
    owner = torch.repeat_interleave(torch.arange(5), lengths)
    columns = torch.randn(3, 15, generator=generator, dtype=torch.float64)
    mask = torch.rand(15, generator=generator) < 0.7
    weights = loss_weights(mask, lengths, torch.tensor([0, 1, 1, 2, 3]), how, constant_length=6)

    def step(micro_batches):
        log_probs = columns[0].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for samples in micro_batches:
            at = torch.isin(owner, torch.tensor(samples)).nonzero().flatten()
            inputs = PolicyLossInputs(log_probs[at], columns[1][at], columns[2][at], mask[at], owner[at] - samples[0])
            loss = (POLICY_LOSSES[name](inputs, Clip(0.2, 0.28, 3.0))[0] * weights[at]).sum()
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
        return total, log_probs.grad

    edges = [0, *sorted(cuts), 5]
    whole, split = step([list(range(5))]), step([list(range(a, b)) for a, b in itertools.pairwise(edges)])
    torch.testing.assert_close(split[0], whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(split[1], whole[1], atol=1e-12, rtol=1e-12)


def test_gspo_says_what_it_needs():
    with pytest.raises(ValueError, match="segments"):
        gspo.policy_loss(golden_inputs(segments=None), Clip())
    with pytest.raises(ValueError, match="non-decreasing"):
        gspo.policy_loss(golden_inputs(segments=torch.tensor([0, 1, 0, 1])), Clip())


def test_gspo_of_an_empty_micro_batch_is_empty():
    loss, _ = gspo.policy_loss(golden_inputs(log_ratio=[], advantages=[]), Clip())
    assert loss.shape == (0,)


def test_cispo_clips_above_only_and_keeps_the_gradient():
    inputs = golden_inputs()
    loss, metrics = cispo.policy_loss(inputs, Clip(0.2, 0.28))
    weight = torch.tensor(LOG_RATIO).double().exp().clamp(max=1.28)
    advantages = torch.tensor(ADVANTAGES).double()
    torch.testing.assert_close(loss.detach(), -weight * advantages * inputs.log_probs.detach(), atol=1e-7, rtol=0)
    loss.sum().backward()
    torch.testing.assert_close(inputs.log_probs.grad, -weight * advantages, atol=1e-7, rtol=0)
    assert metrics["clip_fraction_high"] == (1, 4)
    assert "clip_fraction_low" not in metrics


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_gradient_is_the_policy_gradient(name):
    inputs = golden_inputs(log_ratio=[0.0] * 4, advantages=[2.0] * 4)
    loss, metrics = POLICY_LOSSES[name](inputs, Clip())
    loss.sum().backward()
    torch.testing.assert_close(inputs.log_probs.grad, torch.full((4,), -2.0).double(), atol=1e-12, rtol=0)
    assert metrics["approx_kl"][0] == 0
    assert metrics["ratio"] == (4, 4)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_masked_tokens_contribute_nothing_whatever_they_hold(name):
    bad = torch.tensor([-1.0, float("-inf"), float("nan"), -2.0]).requires_grad_()
    inputs = PolicyLossInputs(
        log_probs=bad,
        old_log_probs=torch.tensor([-1.0, 0.0, 0.0, -2.5]),
        advantages=torch.tensor([1.0, float("nan"), 1.0, -1.0]),
        mask=torch.tensor([1, 0, 0, 1]),
        segments=torch.tensor([0, 0, 0, 0]),
    )
    loss, metrics = POLICY_LOSSES[name](inputs, Clip(dual=3.0))
    loss.sum().backward()
    assert loss[1] == 0
    assert loss[2] == 0
    assert torch.isfinite(bad.grad).all()
    assert bad.grad[1:3].tolist() == [0.0, 0.0]
    for value, count in metrics.values():
        assert torch.isfinite(value)
        assert count == 2


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_huge_log_ratio_stays_finite(name):
    loss, _ = POLICY_LOSSES[name](golden_inputs(log_ratio=[500.0], advantages=[-1.0]), Clip(0.2))
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize(
    ("kwargs", "flag"),
    [({"eps": -0.1}, "--eps-clip -0.1"), ({"eps_high": -1.0}, "--eps-clip-high -1"), ({"dual": 1.0}, "--eps-clip-c 1")],
)
def test_clip_refuses_impossible_bounds(kwargs, flag):
    with pytest.raises(ConfigError, match=flag):
        Clip(**kwargs)
