import math

import pytest
import torch

from miles_core.algorithm.correction import CorrectionInputs
from miles_core.errors import ConfigError
from miles_tis.config import TisConfig
from miles_tis.correction import importance_correction

TRAIN = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ROLLOUT = torch.tensor([-1.05, -3.0, -0.5, -2.0])


def inputs(train=TRAIN, rollout=ROLLOUT, lengths=(4,), mask=None):
    lengths = torch.tensor(lengths)
    ids = torch.arange(len(lengths))
    return CorrectionInputs(
        old_log_probs=train,
        rollout_log_probs=rollout,
        mask=torch.ones_like(train) if mask is None else mask,
        advantages=torch.ones_like(train),
        lengths=lengths,
        group=ids,
        rollout=ids,
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


@pytest.mark.parametrize("options", [{"clip": 0.5}, {"clip_low": 1.5}, {"threshold": 0.0}, {"threshold": -2.0}])
def test_bounds_in_the_wrong_order_are_refused(options):
    with pytest.raises(ConfigError, match="tis"):
        importance_correction(inputs(), TisConfig(use=True, **options))
