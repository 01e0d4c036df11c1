"""Routing records that a rollout worker receives, checks and sends on."""

from __future__ import annotations

import pytest

from miles_core.errors import PlanError
from miles_testing import plan
from miles_testing.doubles import remote


def test_routes_are_replayed_as_without_workers(toy_run):
    """With ``--r3-buffer-size`` records would stay in memory that the user wants on disk."""
    here = toy_run(["r3"])
    there = toy_run(["r3", remote.__file__], runtime="remote", rollout_workers=2)
    for name in ("reward/mean", "r3/tokens_differing", "r3/routers_differing"):
        assert [m[name] for m in there.metrics] == [m[name] for m in here.metrics]
    norms = [[m["train/grad_norm"] for m in run.metrics] for run in (there, here)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    with pytest.raises(PlanError, match=r"(?s)rollout.workers == none.*workers keep whole records in shared memory"):
        plan(["r3"], rollout_workers=2, r3_buffer_size=3)
