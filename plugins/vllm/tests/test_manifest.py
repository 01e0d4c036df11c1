"""What the plan says about runs with vLLM."""

from __future__ import annotations

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_testing import tiny_checkpoint
from miles_vllm import installed, review
from miles_vllm.config import OWN, REFUSED, read_args


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch):
    """As where a supported vLLM is installed."""
    monkeypatch.setattr(review, "version", lambda: "0.32.0+cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("dense") / "model")


@pytest.mark.parametrize(
    ("found", "good"), [("0.26.0", True), ("0.32.1", True), ("0.25.1", False), ("0.33.0", False), (None, False)]
)
def test_a_supported_version_is_installed(plan, monkeypatch, dense, found, good):
    monkeypatch.setattr(review, "version", lambda: found)
    if good:
        assert "vllm" in plan(engine="vllm", device="cpu", hf_checkpoint=dense).order
        return
    with pytest.raises(PlanError, match=r"vllm needs vLLM >=0.26,<0.33(.|\n)*pip install(.|\n)*--engine embedded"):
        plan(engine="vllm", device="cpu", hf_checkpoint=dense)


def test_a_run_on_other_hardware_is_planned_without_vllm(plan, monkeypatch, dense):
    monkeypatch.setattr(review, "version", lambda: None)
    text = str(plan(engine="vllm", hf_checkpoint=dense, facts=["hardware=H200"]))
    assert "vllm needs vllm >=0.26,<0.33 where the run starts: pip install" in text


def test_a_build_for_cpus_has_another_name(monkeypatch):
    def version(name):
        if name == "vllm":
            raise installed.metadata.PackageNotFoundError
        return "0.32.0"

    monkeypatch.setattr(installed.metadata, "version", version)
    assert installed.version() == "0.32.0"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rollout_temperature": 3.0}, "accepts no higher temperature"),
        ({"rollout_top_p": 0.9}, "sampling_support"),
        ({"rollout_top_p": 0.9, "full_vocab_logprobs": True}, "over the sampling support only"),
        ({"schedule": "async", "pause_generation_mode": "retract"}, "a response must have one version"),
        ({"vllm_enable_sleep_mode": True}, "sleeps on GPUs only"),
        ({"vllm_enable_return_routed_experts": True}, "records routed experts on GPUs only"),
        ({"media": True}, "media"),
        ({"plugins": ["fp8"], "rollout_precision": "fp8"}, "format:fp8"),
        ({"plugins": ["speculative"]}, "draft"),
        ({"plugins": ["true_on_policy"], "true_on_policy_mode": True}, "true_on_policy"),
        ({"vllm_args": '{"seed": 1}'}, "determined by --seed"),
        ({"vllm_args": "[1"}, "expected a JSON object"),
        ({"vllm_args": "[1]"}, "expected a JSON object"),
        ({"vllm_args": '{"enable_lora": true}'}, "determined by --lora-sync adapter"),
    ],
)
def test_what_vllm_cannot_do_is_refused(plan, dense, options, reason):
    with pytest.raises((PlanError, ConfigError), match=reason):
        plan(engine="vllm", device="cpu", hf_checkpoint=dense, **options)


def test_experts_are_refused_on_a_cpu(plan, tmp_path):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    with pytest.raises(PlanError, match="computes another function with experts"):
        plan(engine="vllm", device="cpu", hf_checkpoint=checkpoint)
    facts = ["gpu.count=1", "gpu.sm=90"]
    found = plan(engine="vllm", device="auto", hf_checkpoint=checkpoint, plugins=["r3"], facts=facts)
    assert {"r3", "vllm"} <= {*found.order}


def test_a_colocated_vllm_can_sleep(plan):
    found = plan(engine="vllm", device="auto", colocate=True, facts=["gpu.count=1", "gpu.sm=90"])
    assert [(s.path, s.value) for s in found.sets] == [("vllm.enable_sleep_mode", True)]


def test_no_option_is_both_owned_and_refused():
    assert not OWN.keys() & REFUSED.keys()
    assert read_args('{"max_num_batched_tokens": 8192}') == {"max_num_batched_tokens": 8192}
    assert read_args("") == {}


def test_whole_weights_of_two_policies_on_the_same_servers_are_refused(plan):
    given = {"engine": "vllm", "vllm_url": "http://127.0.0.1:1", "facts": ["package.vllm=0.32.0"]}
    with pytest.raises(PlanError, match=r"one policy per server(.|\n)*policies solver and judge would each send all"):
        plan(policies={"solver": {}, "judge": {}}, **given)
