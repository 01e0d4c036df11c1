import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_mxfp8 import plugin
from miles_testing import FormatPluginContract

BOTH = {"rollout_mxfp8": True, "train_mxfp8": True}


class TestPlugin(FormatPluginContract):
    plugin = plugin
    sizes = {"moe_intermediate_size": 32}  # noqa: RUF012 - its experts have 16 columns, less than a block


def test_mxfp8_training_needs_mxfp8_rollout(plan):
    with pytest.raises(PlanError, match=r"mxfp8 needs rollout\.precision == mxfp8") as refusal:
        plan(train_mxfp8=True, emulate_precision=True)
    assert "--rollout-precision mxfp8" in str(refusal.value)


def test_fp8_rollout_and_mxfp8_training_exclude_each_other(plan):
    with pytest.raises(PlanError, match="fp8 rollout x mxfp8 train"):
        plan(rollout_fp8=True, train_mxfp8=True, emulate_precision=True)
    with pytest.raises(ConfigError, match=r"rollout\.precision is given twice"):
        plan(rollout_fp8=True, rollout_mxfp8=True, emulate_precision=True)


def test_the_recipe_selects_mxfp8_on_both_sides(plan):
    accepted = plan(fp8_recipe="mxfp8", fp8_format="e4m3", emulate_precision=True)
    assert accepted.order == ("mxfp8", "embedded")
    assert {(s.path, s.value) for s in accepted.sets} == {
        ("rollout.precision", "mxfp8"),
        ("train.precision", "mxfp8"),
    }
    assert plan(fp8_recipe="mxfp8", **BOTH, emulate_precision=True).order == ("mxfp8", "embedded")
    with pytest.raises(PlanError, match="--fp8-recipe mxfp8 is MXFP8 on both sides"):
        plan(fp8_recipe="mxfp8", rollout_precision="bf16", emulate_precision=True)


def test_other_element_types_are_refused(plan):
    with pytest.raises(ConfigError, match="cannot be 'hybrid'; it is one of e4m3"):
        plan(**BOTH, fp8_format="hybrid", emulate_precision=True)


def test_scaling_is_dynamic(plan):
    assert plan(rollout_mxfp8=True, fp8_dynamic_scaling=True, emulate_precision=True)
    with pytest.raises(PlanError, match=r"mxfp8 needs mxfp8\.dynamic_scaling") as refusal:
        plan(rollout_mxfp8=True, fp8_dynamic_scaling=False, emulate_precision=True)
    assert "--no-fp8-dynamic-scaling" in str(refusal.value) and "delayed scaling" in str(refusal.value)


def test_the_trainers_modules_are_its_own(plan):
    assert plan(rollout_mxfp8=True, transformer_impl="local", bf16=True, emulate_precision=True)
    with pytest.raises(PlanError, match=r"mxfp8 needs trainer == megatron") as refusal:
        plan(rollout_mxfp8=True, transformer_impl="transformer_engine", emulate_precision=True)
    assert "trainer = embedded" in str(refusal.value)
    with pytest.raises(ConfigError, match=r"--transformer-impl local: it belongs to the plugin fp8 or mxfp8"):
        plan(transformer_impl="local")


def test_a_plan_says_what_emulation_costs(plan):
    advice = plan(facts=["gpu=H100"], rollout_precision="mxfp8", train_precision="mxfp8", emulate_precision=True).advice
    (note,) = (line for line in advice if "emulated products cost" in line)
    assert "1.44 times" in note and "on a GPU was not measured" in note
