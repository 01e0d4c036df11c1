"""What a run prepares: environment variables that a plugin sets, and notes of the plan about policies."""

import os

import pytest

from miles_core.errors import PlanError
from miles_testing import plan, toy_run

PLUGIN = """
from miles_core.plugin import Plugin, Set

plugin = Plugin("ordered", "sets a variable", "0", "~=0.1", sets={"env.MILES_TEST_ORDER": "1"})
"""


@pytest.fixture
def ordered(tmp_path, monkeypatch):
    monkeypatch.delenv("MILES_TEST_ORDER", raising=False)
    path = tmp_path / "ordered.py"
    path.write_text(PLUGIN)
    yield str(path)
    os.environ.pop("MILES_TEST_ORDER", None)


def test_it_is_set_before_the_run_is_built(ordered):
    assert toy_run([ordered], steps=1).run.plan.sets[0].path == "env.MILES_TEST_ORDER"
    assert os.environ["MILES_TEST_ORDER"] == "1"


def test_a_value_of_the_user_contradicts_it(ordered, monkeypatch):
    monkeypatch.setenv("MILES_TEST_ORDER", "0")
    with pytest.raises(PlanError, match="environment variable MILES_TEST_ORDER"):
        plan([ordered])


def test_a_variable_that_changes_nothing_is_a_line_of_the_plan(ordered, monkeypatch):
    monkeypatch.setenv("MILES_TEST_ORDER", "0")
    with open(ordered, "w", encoding="utf-8") as file:
        file.write(PLUGIN.replace('"1"}', 'Set("1", when="colocate")}'))
    line = "no effect: environment variable MILES_TEST_ORDER=0: no plugin of this run uses it with these options"
    assert line in plan([ordered]).advice


def test_a_note_that_applies_to_some_policies_names_them(tmp_path):
    (tmp_path / "two.yaml").write_text("policies: {solver: {rollout_precision: fp8}, proposer: {}}")
    options = {"config": tmp_path / "two.yaml", "emulate_precision": True}
    said = "--emulate-precision has no effect without a number format (--rollout-precision, --train-precision)"
    assert f"{said} (of proposer)" in plan(["fp8"], **options).advice
    (tmp_path / "two.yaml").write_text("policies: {solver: {}, proposer: {}}")
    assert said in plan(**options).advice


@pytest.mark.parametrize(
    ("plugins", "options", "refused", "proposed"),
    [
        # --moe-capacity-factor would enable the dropped plugin again
        (["experts"], {"family": "llama", "moe_capacity_factor": 1.5}, "drop experts", "no small change"),
        (["r3"], {"family": "llama"}, "drop experts", "drop r3 from --plugins"),
        # the estimators sft and distillation enable plugins that need more than this run has; ppo needs no more
        ([], {"advantage_estimator": "gmpo", "gamma": 0.9}, "estimator sft", "estimator ppo"),
        ([], {"advantage_estimator": "gmpo", "gamma": 0.9}, "estimator distillation", "--gamma 1"),
    ],
)
def test_no_fix_is_undone_by_plugins_that_options_enable(plugins, options, refused, proposed):
    with pytest.raises(PlanError) as error:
        plan(plugins, **options)
    assert refused not in str(error.value) and proposed in str(error.value)
