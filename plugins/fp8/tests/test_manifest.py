import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_fp8 import plugin
from miles_testing import FormatPluginContract


class TestPlugin(FormatPluginContract):
    plugin = plugin


def test_the_recipe_selects_fp8_on_both_sides(plan):
    accepted = plan(fp8_recipe="blockwise", fp8_format="e4m3", emulate_precision=True)
    assert accepted.order == ("fp8", "embedded")
    assert {(s.path, s.value) for s in accepted.sets} == {("rollout.precision", "fp8"), ("train.precision", "fp8")}
    with pytest.raises(PlanError, match="--fp8-recipe blockwise is block-wise FP8 on both sides"):
        plan(fp8_recipe="blockwise", train_precision="bf16", emulate_precision=True)


def test_scaling_is_dynamic(plan):
    assert plan(rollout_fp8=True, fp8_dynamic_scaling=True, emulate_precision=True)
    with pytest.raises(PlanError, match=r"fp8 needs fp8\.dynamic_scaling") as refusal:
        plan(rollout_fp8=True, fp8_dynamic_scaling=False, emulate_precision=True)
    assert "--no-fp8-dynamic-scaling" in str(refusal.value) and "delayed scaling" in str(refusal.value)


def test_the_trainers_modules_are_its_own(plan):
    assert plan(rollout_fp8=True, transformer_impl="local", bf16=True, emulate_precision=True)
    with pytest.raises(PlanError, match=r"fp8 needs trainer == megatron") as refusal:
        plan(rollout_fp8=True, transformer_impl="transformer_engine", emulate_precision=True)
    assert "trainer = embedded" in str(refusal.value)
    with pytest.raises(ConfigError, match=r"--transformer-impl local: it belongs to the plugin fp8 or mxfp8"):
        plan(transformer_impl="local")


def test_a_recipe_that_nobody_has_is_one_sentence(plan):
    with pytest.raises(ConfigError) as refused:
        plan(fp8_recipe="xyz")
    assert str(refused.value) == ("--fp8-recipe xyz: fp8.recipe cannot be 'xyz'; it is one of blockwise or mxfp8")


@pytest.mark.parametrize(
    ("facts", "options", "cost"),
    [
        (["gpu=A100"], {"device": "cuda"}, "measured on H200, training took 1.02 times"),
        (["gpu=H100"], {"device": "cuda"}, "measured on H200, training took 1.02 times"),
        (["gpu=H100"], {"device": "cpu"}, "measured on one CPU thread, a step took 1.23 times"),
        (["gpu=none"], {}, "measured on one CPU thread, a step took 1.23 times"),
    ],
)
def test_a_plan_says_what_emulation_costs(plan, facts, options, cost):
    (note,) = (
        line for line in plan(facts=facts, rollout_fp8=True, emulate_precision=True, **options).advice if "cost" in line
    )
    assert cost in note
    assert not [
        line for line in plan(facts=facts, plugins=["fp8"], emulate_precision=True, **options).advice if "cost" in line
    ]


@pytest.mark.parametrize(("gpu", "device", "unused"), [("A100", "cuda", 0), ("H100", "cuda", 1), ("H100", "cpu", 0)])
def test_a_plan_names_tensor_cores_that_emulation_leaves_unused(plan, gpu, device, unused):
    advice = plan(facts=[f"gpu={gpu}"], device=device, rollout_fp8=True, emulate_precision=True).advice
    assert sum("leave --emulate-precision out" in line for line in advice) == unused
