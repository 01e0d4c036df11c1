import subprocess
import sys

import pytest

import miles_int4
from miles_core.errors import ConfigError, PlanError
from miles_core.plugin.load import import_target
from miles_core.precision.format import Format
from miles_int4 import plugin

BOTH = {"rollout_int4": True, "train_int4": True}


def test_the_manifest_imports_no_torch():
    program = "import sys, miles_int4; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_format_is_where_the_manifest_says():
    (name, target), *rest = plugin.formats.items()
    found = import_target("int4", target)
    assert issubclass(found, Format) and found.name == name == "int4" and not rest
    assert plugin.version == miles_int4.__version__


def test_no_special_hardware_is_needed(plan):
    accepted = plan(facts=["gpu.sm=80"], **BOTH)
    assert accepted.order == ("int4", "embedded") and accepted.waived == () and accepted.advice == ()


def test_int4_training_needs_int4_rollout(plan):
    with pytest.raises(PlanError, match="bf16 rollout x int4 train"):
        plan(train_int4=True)


def test_rollout_alone_is_warned_about(plan):
    advice = plan(facts=["model.moe=true"], rollout_int4=True).advice
    assert any("raises the log-prob gap: add --train-int4" in line for line in advice)
    assert any("r3" in line for line in advice) and any("tis" in line for line in advice)


def test_the_environment_is_honoured_as_if_flags_were_given(plan, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "16")
    accepted = plan()
    assert accepted.order == ("int4", "embedded")
    assert {(s.path, s.value) for s in accepted.sets} == {("rollout.precision", "int4"), ("train.precision", "int4")}
    assert accepted.fact("int4.group_size") == 16
    assert plan(int4_group_size=32).fact("int4.group_size") == 32  # the flag wins


def test_the_switch_turned_off_enables_nothing(plan, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "0")
    assert plan().order == ("embedded",)


def test_a_group_size_in_the_environment_of_a_run_without_int4_is_refused(plan, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "64")
    with pytest.raises(ConfigError, match=r"OPEN_TRAINING_INT4_GROUP_SIZE=64: it belongs to the plugin int4.*unset it"):
        plan()


def test_quantisation_aware_training_against_a_bf16_side_is_refused(plan):
    with pytest.raises(PlanError, match="quantisation-aware training is INT4 on both sides"):
        plan(int4_fake_qat=True, rollout_precision="bf16")


def test_experts_only_needs_experts(plan):
    with pytest.raises(PlanError, match="a dense model has none"):
        plan(family="qwen3", int4_scope="experts", **BOTH)


@pytest.mark.parametrize("size", [0, -4])
def test_a_group_size_below_one_is_refused(plan, size):
    with pytest.raises(ConfigError, match=r"int4\.group_size cannot be"):
        plan(**BOTH, int4_group_size=size)
