"""How old the tokens of a sample are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles_core.data.sample import Sample
from miles_core.plugin import Policy
from miles_core.rollout.versions import age, mask_older, staleness, trained_versions


def sample(versions, mask=None):
    return Sample(
        tokens=list(range(8)),
        response_length=5,
        loss_mask=mask,
        rollout_log_probs=[-1.0, -2.0, -3.0, -4.0, -5.0],
        weight_versions=versions,
    )


def test_only_tokens_that_are_trained_on_count():
    mixed = sample([(3, 2), (5, 4)])
    assert trained_versions(mixed).tolist() == [2, 2, 4, 4, 4] and age(mixed, 5) == 3
    assert age(sample([(3, 2), (5, 4)], mask=[0, 0, 1, 1, 1]), 5) == 1
    assert age(sample([]), 5) == 0


def test_staleness_is_told_in_versions_and_tokens():
    run = SimpleNamespace(policies=[Policy(version=4)], policy=Policy(version=4))
    found = staleness(run, [sample([(3, 2), (5, 4)]), sample([(3, 4)])])
    assert found == {
        "rollout/staleness_mean": 1.0,
        "rollout/staleness_max": 2.0,
        "rollout/stale_tokens": pytest.approx(0.2),
    }


def test_a_sample_is_as_old_as_its_own_policy_says():
    policies = [Policy(name="a", version=4), Policy(name="b", version=2)]
    run = SimpleNamespace(policies=policies, policy=policies[0])
    one, two = sample([(3, 2)]), sample([(3, 2)])
    two.policy = "b"
    found = staleness(run, [one, two])
    assert (found["rollout/staleness_max"], found["rollout/stale_tokens"]) == (2.0, 0.5)
    assert (found["a/rollout/staleness_max"], found["b/rollout/staleness_max"]) == (2.0, 0.0)


def test_masking_leaves_the_newest_tokens():
    mixed = sample([(3, 2), (5, 4), (6, 4)], mask=[1, 1, 1, 0, 1])
    mask_older(mixed)
    assert mixed.loss_mask == [0, 0, 1, 0, 1] and mixed.rollout_log_probs == [0.0, 0.0, -3.0, -4.0, -5.0]
    plain = sample([(3, 4), (6, 4)])
    mask_older(plain)
    assert plain.loss_mask is None
