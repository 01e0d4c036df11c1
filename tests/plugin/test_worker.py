"""Workers refuse a plan that does not fit them; the driver names those that run another one."""

import pytest

from miles_core.errors import PlanError
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Active, Deferred, Plan
from miles_core.plugin.worker import accept, same_plan

PLAN = Plan(
    core="0.1.0",
    plugins=(Active("r3", "0.1.0", "miles-plugin-r3", "--plugins"),),
    deferred=(Deferred("mxfp8", "gpu.sm >= 100", "block scales are a Blackwell format"),),
)
R3 = {"r3": Plugin(name="r3", summary="replay", version="0.1.0", core="~=0.1")}


def sm(value):
    from miles_core.plugin.facts import Fact, State

    return [Fact(name="gpu.sm", value=value, state=State.KNOWN, origin="detected")]


def test_accept_returns_the_digest_of_the_plan_it_was_sent():
    assert accept(Plan.from_json(PLAN.to_json()), "0.1.0", R3, sm(100)) == PLAN.digest


def test_accept_refuses_another_core():
    with pytest.raises(PlanError, match=r"made by miles-core 0\.1\.0, but 0\.2\.0 is installed here"):
        accept(PLAN, "0.2.0", R3, sm(100))


def test_accept_refuses_a_missing_plugin():
    with pytest.raises(PlanError, match=r"r3: 0\.1\.0 in the plan, not installed here"):
        accept(PLAN, "0.1.0", {}, sm(100))


def test_accept_checks_the_rules_left_for_workers():
    with pytest.raises(PlanError, match=r"gpu\.sm >= 100"):
        accept(PLAN, "0.1.0", R3, sm(90))


def test_same_plan_names_only_the_workers_that_differ():
    same_plan("aa", {"rank 0": "aa"})
    with pytest.raises(PlanError, match=r"plan aa but rank 1 has bb; engine 0 has cc: install") as caught:
        same_plan("aa", {"rank 0": "aa", "rank 1": "bb", "engine 0": "cc"})
    assert "rank 0" not in str(caught.value)
