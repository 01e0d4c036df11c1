"""How samples are dealt over optimiser steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.sample import Sample
from miles_core.train.data_shard import optimiser_steps


def options(count=None, size=None):
    return SimpleNamespace(num_steps_per_rollout=count, global_batch_size=size)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_rollouts_stay_whole_in_order_and_steps_are_equal(siblings, count):
    """``siblings[i]``: how many samples rollout i was cut into."""
    samples = [Sample(index=9 * i + k, rollout_id=i) for i, n in enumerate(siblings) for k in range(n)]
    step_of, steps = optimiser_steps(samples, options(count))
    assert steps == min(count, len(siblings)) and step_of == sorted(step_of) and set(step_of) == set(range(steps))
    by_rollout = {s.rollout_id: step for s, step in zip(samples, step_of, strict=True)}
    assert all(by_rollout[s.rollout_id] == step for s, step in zip(samples, step_of, strict=True))
    sizes = [list(by_rollout.values()).count(step) for step in range(steps)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("size", "steps"), [(None, 1), (32, 1), (16, 2), (8, 4), (100, 1), (1, 32)])
def test_a_batch_size_is_a_number_of_steps(size, steps):
    step_of, count = optimiser_steps([Sample(index=i) for i in range(32)], options(size=size))
    assert count == steps and max(step_of) == steps - 1
