import dataclasses
import json

import pytest
from published_manifests import ALL, chosen, facts

from miles_core.errors import CheckpointError, PlanError
from miles_core.plugin.facts import Fact
from miles_core.plugin.plan import Plan
from miles_core.plugin.resolve import resolve


def plan(*requested, **given):
    return resolve(requested, ALL, facts(**given))


def test_json_round_trip():
    first = resolve(
        ["r3", "tis"], ALL, facts(chosen("engine", "sglang"), Fact("x.list", ["a", "b"], "test"), rollout="fp8")
    )
    again = Plan.from_json(first.to_json())
    assert again == first
    assert again.digest == first.digest
    assert again.fact("rollout.precision") == "fp8"


def test_an_edited_plan_is_refused():
    content = json.loads(plan("r3").to_json())
    content["plugins"][0]["version"] = "9.9"
    with pytest.raises(CheckpointError, match="it was edited"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": "x", "facts": [1]}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(CheckpointError, match="not a plan that miles wrote"):
        Plan.from_json(text)


def test_the_digest_follows_what_changes_numbers_and_nothing_else():
    base = plan("r3", "tis")
    assert len(base.digest) == 8
    assert resolve(["r3", "tis"], ALL, facts(Fact("run.save", "elsewhere", "--save"))).digest == base.digest
    assert plan("r3").digest != base.digest
    assert plan("r3", "tis", rollout="fp8").digest != base.digest
    newer = {**ALL, "tis": dataclasses.replace(ALL["tis"], version="0.2.0")}
    assert resolve(["r3", "tis"], newer, facts()).digest != base.digest


def test_a_worker_compares_its_own_installation():
    accepted = plan("r3", "tis")
    accepted.check_installed(ALL)
    with pytest.raises(
        PlanError, match=r"r3: 0\.1\.0 in the plan, not installed here; tis: 0\.1\.0 in the plan, 0\.2\.0"
    ):
        accepted.check_installed({"tis": dataclasses.replace(ALL["tis"], version="0.2.0")})


def test_header_names_versions_and_digest():
    accepted = plan("r3")
    assert accepted.header == f"miles-core 0.1.0, plugins: r3 0.1.0 (plan {accepted.digest})"
