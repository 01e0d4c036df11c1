import subprocess
import sys

import pytest

import miles_nvfp4
from miles_core.errors import ConfigError, PlanError
from miles_core.plugin.load import import_target
from miles_core.precision.format import Format
from miles_nvfp4 import plugin

BOTH = {"rollout_nvfp4": True, "train_nvfp4": True}


def test_the_manifest_imports_no_torch():
    program = "import sys, miles_nvfp4; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_format_is_where_the_manifest_says():
    (name, target), *rest = plugin.formats.items()
    found = import_target("nvfp4", target)
    assert issubclass(found, Format) and found.name == name == "nvfp4" and not rest
    assert plugin.version == miles_nvfp4.__version__


def test_hardware_is_checked_and_emulation_waives_it(plan):
    with pytest.raises(PlanError, match=r"gpu\.sm >= 100") as refusal:
        plan(facts=["gpu.sm=90"], **BOTH)
    assert "--emulate-precision" in str(refusal.value)
    assert plan(facts=["gpu.sm=100"], **BOTH).order == ("nvfp4", "embedded")
    assert plan(facts=["gpu.sm=90"], emulate_precision=True, **BOTH).waived


def test_it_says_that_it_is_experimental(plan):
    assert plan(facts=["gpu.sm=100"], **BOTH).advice == ("nvfp4 rollout x nvfp4 train is experimental (nvfp4)",)


@pytest.mark.parametrize("side", ["rollout_nvfp4", "train_nvfp4"])
def test_one_side_alone_is_refused(plan, side):
    with pytest.raises(PlanError, match="is supported by no active plugin"):
        plan(**{side: True}, emulate_precision=True)


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
    with pytest.raises(PlanError, match=r"nvfp4 needs model\.moe"):
        plan(family="qwen3", **BOTH, emulate_precision=True)
