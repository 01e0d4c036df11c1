import dataclasses
import math

import pytest
import torch

from miles_core.plugin import ConfigError
from miles_core.trainer import CorrectionInputs
from miles_tis.bounds import bounds, rejection_bounds
from miles_tis.config import TisConfig
from miles_tis.correction import Ratios, correct, derived, importance_correction, needs, opsm

TRAIN = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ROLLOUT = torch.tensor([-1.05, -3.0, -0.5, -2.0])


def inputs(train=TRAIN, rollout=ROLLOUT, lengths=(4,), mask=None, current=None, advantages=None):
    lengths = torch.tensor(lengths)
    ids = torch.arange(len(lengths))
    return CorrectionInputs(
        old_log_probs=train,
        rollout_log_probs=rollout,
        mask=torch.ones_like(train) if mask is None else mask,
        advantages=torch.ones_like(train) if advantages is None else advantages,
        lengths=lengths,
        group=ids,
        rollout=ids,
        log_probs=current,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip": 1e9}, [1.051271, 2.718282, 1, 0.367879]),
        ({"clip": 2.0}, [1.051271, 2, 1, 0.367879]),
        ({"mode": "mask", "clip_low": 0.5, "clip": 5.0}, [1.051271, 2.718282, 1, 0]),
        ({"mode": "mask", "clip_low": 0.5, "clip": 2.0}, [1.051271, 0, 1, 0]),
        ({"mode": "clip", "threshold": 0.5}, [1.051271, 2, 1, 0.5]),
        ({"level": "sequence"}, [1.0512711] * 4),
        ({"level": "geometric"}, [1.0125785] * 4),
    ],
)
def test_golden_values(options, expected):
    got = importance_correction(inputs(), TisConfig(use=True, **options)).factor
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("normalize", [False, True])
def test_on_policy_data_is_left_alone(level, mode, normalize):
    options = TisConfig(use=True, level=level, mode=mode, batch_normalize=normalize, veto=True, clip_low=0.5)
    correction = importance_correction(inputs(rollout=TRAIN), options)
    assert torch.equal(correction.factor, torch.ones(4))


def test_masked_tokens_do_not_matter():
    wild = ROLLOUT.clone()
    wild[1] = -math.inf
    mask = torch.tensor([1.0, 0, 1, 1])
    options = TisConfig(use=True, level="sequence")
    a = importance_correction(inputs(rollout=wild, mask=mask), options).factor
    b = importance_correction(inputs(mask=mask), options).factor
    torch.testing.assert_close(a, b)


def test_batch_normalise_divides_by_the_mean_over_the_step():
    factor = importance_correction(inputs(), TisConfig(use=True, batch_normalize=True)).factor
    assert factor.mean().item() == pytest.approx(1.0, abs=1e-6)


def test_batch_normalise_of_sequences_counts_sequences():
    train = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    rollout = torch.tensor([-1.0, -1.0, -1.0, -2.5])
    options = TisConfig(use=True, level="sequence", batch_normalize=True)
    factor = importance_correction(inputs(train, rollout, lengths=(3, 1)), options).factor
    mean = (1 + math.exp(0.5)) / 2
    torch.testing.assert_close(factor, torch.tensor([1 / mean] * 3 + [math.exp(0.5) / mean]))


def test_veto_drops_the_whole_sequence():
    rollout = torch.tensor([-1.0, -2.0, -0.5, 10.0])
    options = TisConfig(use=True, veto=True)
    factor = importance_correction(inputs(rollout=rollout, lengths=(2, 2)), options).factor
    assert factor.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_metrics_only_leaves_the_loss_untouched():
    correction = importance_correction(inputs(), TisConfig(metrics_only=True))
    assert torch.equal(correction.factor, torch.ones(4))
    total, count = correction.metrics["tis/ratio_mean"]
    assert float(total / count) == pytest.approx((1.051271 + 2.718282 + 1 + 0.367879) / 4, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": 0.5}, "--tis-clip"),
        ({"clip_low": 1.5}, "do not contain 1"),
        ({"threshold": 0.0}, "greater than 0"),
        ({"threshold": -2.0}, "greater than 0"),
    ],
)
def test_bounds_in_the_wrong_order_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        bounds(TisConfig(use=True, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reject": "token"}, "has no bounds"),
        ({"reject": "sequence", "reject_low": 2.0}, "do not contain 1"),
        ({"reject": "sequence", "reject_high": 0.5}, "do not contain 1"),
    ],
)
def test_rejection_bounds_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        rejection_bounds(TisConfig(use=True, **options))


def fraction(correction, name):
    total, count = correction.metrics[f"tis/fraction_{name}"]
    return float(total / count)


def test_threshold_bounds_both_ends_and_truncate_uses_the_upper_one():
    assert bounds(TisConfig(threshold=4.0, mode="clip")) == (0.25, 4.0)
    assert bounds(TisConfig(threshold=0.25, mode="mask")) == (0.25, 4.0)
    assert bounds(TisConfig(threshold=4.0)) == (0.0, 4.0)


def test_only_bounds_in_force_are_counted():
    names = {
        mode: {
            n for n in importance_correction(inputs(), TisConfig(mode=mode, clip_low=0.5)).metrics if "fraction" in n
        }
        for mode in ("truncate", "clip", "mask")
    }
    assert names == {
        "truncate": {"tis/fraction_truncated_high"},
        "clip": {"tis/fraction_truncated_high", "tis/fraction_truncated_low"},
        "mask": {"tis/fraction_masked_high", "tis/fraction_masked_low"},
    }
    clipped = importance_correction(inputs(), TisConfig(mode="clip", clip_low=0.5))
    assert fraction(clipped, "truncated_high") == 0.25 and fraction(clipped, "truncated_low") == 0.25
    assert "tis/fraction_masked_low" not in importance_correction(inputs(), TisConfig(mode="mask")).metrics


def test_rejection_has_bounds_of_its_own():
    options = TisConfig(clip=2.0, reject="token", reject_low=0.5)
    correction = importance_correction(inputs(), options)
    torch.testing.assert_close(correction.factor, torch.tensor([1.051271, 2, 1, 0]))
    assert fraction(correction, "rejected_low") == 0.25 and "tis/fraction_rejected_high" not in correction.metrics


def test_rejection_of_sequences_drops_all_of_their_tokens():
    options = TisConfig(clip=100.0, reject="geometric", reject_high=1.5, reject_low=0.5)
    correction = importance_correction(inputs(lengths=(2, 2)), options)  # geometric means 1.690 and 0.607
    torch.testing.assert_close(correction.factor, torch.tensor([0, 0, 1, 0.367879]))
    assert fraction(correction, "rejected_high") == 0.5 and fraction(correction, "rejected_low") == 0


def test_batch_normalise_counts_rejected_items_as_zero():
    token = TisConfig(clip=100.0, reject="token", reject_high=2.0, batch_normalize=True)
    factor = importance_correction(inputs(), token).factor
    mean = (1.051271 + 0 + 1 + 0.367879) / 4
    torch.testing.assert_close(factor, torch.tensor([1.051271, 0, 1, 0.367879]) / mean)
    sequence = TisConfig(clip=100.0, level="sequence", reject="sequence", reject_high=1.5, batch_normalize=True)
    factor = importance_correction(inputs(lengths=(2, 2)), sequence).factor  # weights 2.858 (rejected) and 0.368
    torch.testing.assert_close(factor, torch.tensor([0.0, 0, 2, 2]))
    # a rejected token takes nothing from the mean of its sequence's weight
    mixed = TisConfig(clip=100.0, level="geometric", reject="token", reject_low=0.5, batch_normalize=True)
    assert importance_correction(inputs(), mixed).factor.tolist() == pytest.approx([1, 1, 1, 0])


def test_opsm_drops_negative_tokens_of_sequences_the_policy_has_left():
    old = torch.tensor([-1.0, -1, -1, -1, -1, -1])
    current = torch.tensor([-1.5, -1, -1.5, -1, -0.5, -1])
    advantages = torch.tensor([-1.0, -1, 1, 1, -1, -1])
    given = inputs(old, old, lengths=(2, 2, 2), current=current, advantages=advantages)
    correction = opsm(given, delta=0.2)
    assert correction.factor.tolist() == [0, 0, 1, 1, 1, 1]
    assert fraction(correction, "opsm") == pytest.approx(1 / 3)
    assert opsm(given, delta=0.3).factor.tolist() == [1] * 6
    on_policy = inputs(old, old, lengths=(2, 2, 2), advantages=advantages)
    assert opsm(on_policy, delta=0.0).factor.tolist() == [1] * 6


def test_what_is_asked_for_decides_what_reaches_the_loss_and_what_it_costs():
    current = TRAIN - 1
    given = inputs(current=current, advantages=-torch.ones(4))
    assert torch.equal(correct(given, TisConfig(opsm=True)).factor, torch.zeros(4))
    assert "tis/ratio_mean" not in correct(given, TisConfig(opsm=True)).metrics
    assert torch.equal(correct(inputs(), TisConfig(opsm=True, metrics_only=True)).factor, torch.ones(4))
    assert not torch.equal(correct(inputs(), TisConfig(use=True, metrics_only=True)).factor, torch.ones(4))
    assert not torch.equal(correct(inputs(), TisConfig()).factor, torch.ones(4))
    cost = {name: needs(TisConfig(**{name: True})) for name in ("use", "opsm", "metrics_only", "batch_normalize")}
    assert [cost[n].old for n in cost] == [True, False, True, True]
    assert [cost[n].current for n in cost] == [False, True, False, False]
    assert [cost[n].whole_step for n in cost] == [False, False, False, True]


def test_metrics_against_their_definitions():
    ratio = (TRAIN - ROLLOUT).double().exp()
    found = {n: float(a / b) for n, (a, b) in importance_correction(inputs(), TisConfig(clip=9.0)).metrics.items()}
    assert found["tis/chi2_token"] == pytest.approx(float((ratio**2).mean() - 1))
    assert found["tis/chi2_sequence"] == pytest.approx(float(ratio.prod() ** 2 - 1))
    assert found["tis/ppl_ratio"] == pytest.approx(1 / 1.0125785, rel=1e-6)
    assert derived({"a/tis/weight_mean": 2.0, "a/tis/weight_square_mean": 8.0}) == {"a/tis/ess": 0.5}
    ess = derived(found)["tis/ess"]
    assert ess == pytest.approx(float(ratio.sum() ** 2 / (4 * (ratio**2).sum())))


def test_sums_are_clamped_and_not_their_terms():
    """A token of 30 nats and one of -25 make a sequence of 5; the second moment of one of 15 nats is exp(30)."""
    far = inputs(torch.tensor([30.0, 0, 15, 0]), torch.tensor([0.0, 25, 0, 0]), lengths=(2, 2))
    ratios = Ratios.of(far)
    assert ratios.sequence.tolist() == [5, 15] and ratios.token.tolist() == [20, -20, 15, 0]
    total, count = importance_correction(far, TisConfig(clip=9.0)).metrics["tis/chi2_sequence"]
    assert float(total / count) == pytest.approx((math.exp(10) + math.exp(30)) / 2 - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_no_correction_waits_for_the_gpu(level, mode):
    options = TisConfig(use=True, level=level, mode=mode, veto=True, opsm=True, clip_low=0.5)
    given = inputs(current=TRAIN)
    given = dataclasses.replace(
        given, **{n: x.to("cuda") for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
    )
    correct(given, options)  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        correct(given, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
