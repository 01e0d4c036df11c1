import subprocess
import sys

import pytest

import miles_fp8
from miles_core.errors import ConfigError, PlanError
from miles_core.plugin.load import import_target
from miles_core.precision.format import Format
from miles_fp8 import plugin


def test_the_manifest_imports_no_torch():
    program = "import sys, miles_fp8; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_format_is_where_the_manifest_says():
    (name, target), *rest = plugin.formats.items()
    found = import_target("fp8", target)
    assert issubclass(found, Format) and found.name == name == "fp8" and not rest
    assert plugin.version == miles_fp8.__version__


def test_hardware_is_checked_and_emulation_waives_it(plan):
    for flags in ({"rollout_fp8": True}, {"rollout_fp8": True, "train_fp8": True}):
        with pytest.raises(PlanError, match=r"gpu\.sm >= 90") as refusal:
            plan(facts=["gpu.sm=80"], **flags)
        assert "--emulate-precision" in str(refusal.value)
        assert plan(facts=["gpu.sm=90"], **flags).order == ("fp8", "embedded")
        assert plan(facts=["gpu.sm=80"], emulate_precision=True, **flags).waived


def test_fp8_training_needs_fp8_rollout(plan):
    with pytest.raises(PlanError, match="fp8"):
        plan(train_fp8=True, emulate_precision=True)


def test_replay_and_corrections_are_recommended_where_the_sides_differ(plan):
    mixed = plan(facts=["model.moe=true"], rollout_fp8=True, emulate_precision=True).advice
    assert any("r3" in line for line in mixed) and any("tis" in line for line in mixed)
    unified = plan(facts=["model.moe=true"], rollout_fp8=True, train_fp8=True, emulate_precision=True).advice
    assert not any("r3" in line for line in unified)


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
