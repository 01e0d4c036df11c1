import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_int4 import plugin
from miles_testing import FormatPluginContract

BOTH = {"rollout_int4": True, "train_int4": True}


class TestPlugin(FormatPluginContract):
    plugin = plugin
    options = {"int4_group_size": 16}  # noqa: RUF012
    gap = 1e-2


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
