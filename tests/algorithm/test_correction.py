import pytest
import torch

from miles_core.algorithm.correction import Correction, CorrectionInputs, compose_corrections, identity, needs_of
from miles_core.algorithm.objective import Needs


def inputs():
    column = torch.tensor([-1.0, -2.0, -0.5])
    return CorrectionInputs(
        old_log_probs=column,
        rollout_log_probs=column - 1,
        mask=torch.tensor([1, 1, 0]),
        advantages=torch.ones(3),
        lengths=torch.tensor([2, 1]),
        group=torch.zeros(2, dtype=torch.int64),
        rollout=torch.arange(2),
    )


def halve(inputs):
    return Correction(
        torch.full((3,), 0.5), torch.tensor([True, True, False]), {"half": (torch.ones(()), torch.ones(()))}
    )


def drop_first(inputs):
    return Correction(
        torch.full((3,), 4.0), torch.tensor([False, True, True]), {"first": (torch.ones(()), torch.ones(()))}
    )


def test_identity_changes_nothing():
    assert identity(inputs()).factor.tolist() == [1.0, 1.0, 1.0]
    assert identity(inputs()).metrics == {}


def test_composition_multiplies_weights_and_unites_rejections():
    composed = compose_corrections(compose_corrections(identity, halve), drop_first)(inputs())
    assert composed.weight.tolist() == [2.0, 2.0, 2.0]
    assert composed.factor.tolist() == [0.0, 2.0, 0.0]
    assert sorted(composed.metrics) == ["first", "half"]


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'half'"):
        compose_corrections(halve, halve)(inputs())


def test_a_rejected_infinite_weight_does_not_become_nan():
    correction = Correction(torch.tensor([float("inf"), 1.0]), torch.tensor([False, True]))
    assert correction.factor.tolist() == [0.0, 1.0]


def test_needs_add_up_over_the_chain_and_are_all_of_the_step_when_not_declared():
    assert needs_of(identity) == Needs(old=False, current=False, whole_step=False)
    assert needs_of(halve) == needs_of(compose_corrections(identity, halve)) == Needs()
    one = compose_corrections(identity, halve, Needs(whole_step=False))
    assert needs_of(one) == Needs(old=True, current=False, whole_step=False)
    both = compose_corrections(one, drop_first, Needs(old=False, current=True, whole_step=False))
    assert needs_of(both) == Needs(old=True, current=True, whole_step=False)
    assert needs_of(compose_corrections(both, drop_first)).whole_step
