"""Workers refuse a plan that does not fit them."""

import dataclasses

import pytest

from miles_core.errors import PlanError
from miles_core.plugin.facts import Fact
from miles_core.plugin.plan import Active, Deferred, Plan
from miles_core.run.prepare import accept
from miles_core.version import __version__

PLAN = Plan(core=__version__)


def test_a_worker_accepts_the_plan_it_was_sent():
    assert "tis" in accept(Plan.from_json(PLAN.to_json())).names


def test_a_worker_refuses_another_core():
    with pytest.raises(PlanError, match=r"made by miles-core 9\.0, but .* is installed here"):
        accept(dataclasses.replace(PLAN, core="9.0"))


def test_a_worker_refuses_a_missing_plugin():
    gone = Active("gone", "0.1.0", "miles-plugin-gone", "--plugins")
    with pytest.raises(PlanError, match=r"gone: 0\.1\.0 in the plan, not installed here"):
        accept(dataclasses.replace(PLAN, plugins=(gone,)))


def test_a_worker_checks_the_rules_left_for_it(monkeypatch):
    rule = Deferred("mxfp8", "gpu.sm >= 100", "block scales are a Blackwell format")
    monkeypatch.setattr("miles_core.run.prepare.gpu_facts", lambda: [Fact("gpu.sm", 90, "detected")])
    with pytest.raises(PlanError, match=r"gpu\.sm >= 100"):
        accept(dataclasses.replace(PLAN, deferred=(rule,)))
