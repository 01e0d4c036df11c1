"""What may be said in closed form, by enumerating every sequence over a tiny vocabulary."""

from itertools import product

import pytest
import torch

from miles_core.trainer import CorrectionInputs
from miles_tis.config import TisConfig
from miles_tis.correction import importance_correction

VOCABULARY, LENGTH = 3, 3
UNBOUNDED = 1e9


@pytest.fixture
def policies():
    """Log-probabilities of every sequence's tokens, [sequences, length], under trainer and engine."""
    generator = torch.Generator().manual_seed(0)
    tables = [
        torch.randn(*[VOCABULARY] * LENGTH, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    sequences = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))

    def of(table):
        columns = []
        for t in range(LENGTH):
            prefix = [
                sequences[:, i] if i < t else torch.zeros(len(sequences), dtype=torch.int64) for i in range(LENGTH)
            ]
            columns.append(table[tuple(prefix)].log_softmax(-1).gather(-1, sequences[:, t : t + 1]))
        return torch.cat(columns, -1)

    return sequences, of(tables[0]), of(tables[0] + 0.5 * tables[1])


def weights(train, rollout, **options):
    count = len(train)
    ids = torch.arange(count)
    given = CorrectionInputs(
        old_log_probs=train.flatten(),
        rollout_log_probs=rollout.flatten(),
        mask=torch.ones(train.numel()),
        advantages=torch.ones(train.numel()),
        lengths=torch.full((count,), train.shape[1]),
        group=ids,
        rollout=ids,
    )
    return importance_correction(given, TisConfig(clip=UNBOUNDED, **options)).factor.view_as(train)


def test_the_sequence_weight_makes_every_expectation_the_trainers(policies):
    sequences, train, rollout = policies
    f = torch.randn(len(sequences), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampled, wanted = rollout.sum(-1).exp(), train.sum(-1).exp()
    assert float(sampled.sum()) == pytest.approx(1) and float(wanted.sum()) == pytest.approx(1)
    weight = weights(train, rollout, level="sequence")
    assert torch.equal(weight[:, 0], weight[:, -1])
    assert float((sampled * weight[:, 0] * f).sum()) == pytest.approx(float((wanted * f).sum()), abs=1e-12)
    assert abs(float((sampled * f).sum() - (wanted * f).sum())) > 1e-3


def test_a_prefix_of_ratios_corrects_what_depends_on_the_prefix(policies):
    sequences, train, rollout = policies
    ratio = weights(train, rollout)
    for t in range(1, LENGTH + 1):
        f = (sequences[:, :t] * torch.arange(1, t + 1)).sum(-1).double().cos()
        left = (rollout.sum(-1).exp() * ratio[:, :t].prod(-1) * f).sum()
        assert float(left) == pytest.approx(float((train.sum(-1).exp() * f).sum()), abs=1e-12)


def test_the_token_ratio_has_mean_one_given_its_prefix(policies):
    sequences, train, rollout = policies
    ratio = weights(train, rollout)
    for first in range(VOCABULARY):
        for second in range(VOCABULARY):
            rows = (sequences[:, 0] == first) & (sequences[:, 1] == second)
            assert float((rollout[rows, 2].exp() * ratio[rows, 2]).sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_other_weights_stay_within_their_bounds(policies, level):
    _, train, rollout = policies
    weight = weights(train, rollout, level=level, mode="clip", threshold=1.25)
    assert weight.min() >= 0.8 and weight.max() <= 1.25 and weight.unique().numel() > 3
