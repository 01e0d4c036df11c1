import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_nvfp4 import plugin
from miles_testing import FormatPluginContract, toy_files

BOTH = {"rollout_nvfp4": True, "train_nvfp4": True}


class TestPlugin(FormatPluginContract):
    plugin = plugin


def test_the_recipe_selects_nvfp4_on_both_sides(plan):
    accepted = plan(fp4_recipe="nvfp4", fp4_format="e2m1", emulate_precision=True)
    assert accepted.order == ("nvfp4", "embedded")
    assert {(s.path, s.value) for s in accepted.sets} == {
        ("rollout.precision", "nvfp4"),
        ("train.precision", "nvfp4"),
    }
    with pytest.raises(PlanError, match="--fp4-recipe nvfp4 is NVFP4 on both sides"):
        plan(fp4_recipe="nvfp4", train_precision="bf16", emulate_precision=True)


def test_other_recipes_and_element_types_are_refused(plan):
    with pytest.raises(ConfigError, match="it is one of nvfp4"):
        plan(fp4_recipe="mxfp4")
    with pytest.raises(ConfigError, match="it is one of e2m1"):
        plan(**BOTH, fp4_format="e3m0")


def test_a_dense_model_is_refused(plan):
    with pytest.raises(PlanError, match=r"needs model\.moe"):
        plan(family="qwen3", **BOTH, emulate_precision=True)


def test_a_dense_teacher_is_refused_in_nvfp4(plan, tmp_path):
    """The precision of a run is that of its teachers, too, unless the file gives them another one."""
    dense, file = toy_files("llama") / "model", tmp_path / "policies.yaml"
    text = "policies: {{student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{}'{}}}}}"
    file.write_text(text.format(dense, ""))
    with pytest.raises(PlanError, match=r"of teacher needs model\.moe(?s:.*)rollout_precision of a dense teacher"):
        plan(["distillation"], config=file, **BOTH, emulate_precision=True)
    file.write_text(text.format(dense, ", train_precision: bf16, rollout_precision: bf16"))
    plan(["distillation"], config=file, **BOTH, emulate_precision=True)


def test_a_plan_says_what_emulation_costs(plan):
    advice = plan(facts=["gpu=H100"], rollout_precision="nvfp4", train_precision="nvfp4", emulate_precision=True).advice
    (note,) = (line for line in advice if "emulated products cost" in line)
    assert "1.35 times" in note and "on a GPU was not measured" in note
