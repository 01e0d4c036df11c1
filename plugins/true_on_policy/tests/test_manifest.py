"""What cannot be exact is refused when the run is planned, with the reason."""

import pytest

from miles_core.errors import PlanError
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import plan

OTHERS = ("A100", "B200", "L40S")
INT4 = {"int4_group_size": 16}


@pytest.mark.parametrize(
    ("plugins", "options", "facts", "because"),
    [
        *(
            ([], {"device": "cuda"}, [f"gpu={gpu}"], r"verified on CPUs and on Hopper GPUs \(sm_90\) only")
            for gpu in OTHERS
        ),
        ([], {"device": "auto"}, ["gpu=B200"], "give --device cpu"),
        (["fp8"], {"device": "cuda", "rollout_fp8": True, "train_fp8": True}, ["gpu=H200"], "unless --fp8-fixed-order"),
        (
            ["int4"],
            {"device": "cuda", "rollout_precision": "int4", "train_precision": "int4", **INT4},
            ["gpu=H200"],
            "by the number of rows",
        ),
        (["cpu_kernels"], {"device": "cpu"}, [], "adds? in another order"),
        (["int4"], {"rollout_precision": "int4", **INT4}, [], "than a plain trainer"),
        ([], {"kv_cache_dtype": "float8_e4m3fn"}, [], "rounded keys and values"),
        (["lora"], {}, [], "base plus adapters as one matrix"),
        ([], {"family": "deepseek_v32"}, [], "indexers choose"),
        (["speculative"], {"draft_model_path": "draft", "spec_topk": 2}, [], "trees of drafts have no attention"),
        (["speculative"], {"draft_model_path": "draft", "sglang_speculative_eagle_topk": 3}, [], "trees of drafts"),
        (["lora"], {"lora_sync": "adapter", "lora_dropout": 0.1}, [], "leave --lora-dropout out"),
        (["experts"], {"moe_capacity_factor": 1.5}, ["model.moe=true"], "leave --moe-capacity-factor out"),
    ],
)
def test_it_is_refused(plugins, options, facts, because):
    with pytest.raises(PlanError, match=because):
        plan(["true_on_policy", *plugins], facts, **options)


SGLANG = {"engine": "sglang", "family": "qwen3_moe"}


@pytest.mark.parametrize(
    ("options", "gpu", "because"),
    [
        ({"family": "llama"}, "H200", "equal bits were verified for these two"),
        ({}, "B200", "inside SGLang only the plugin's GPU kernels"),
        ({"device": "cpu"}, "none", "inside SGLang only the plugin's GPU kernels"),
        ({"sglang_url": "http://host:30000"}, "H200", "does not load the plugin's kernels"),
        ({"sglang_tp_size": 2}, "H200", "add parts of a sum in another order"),
        ({"rollout_top_p": 0.9}, "H200", "with its own functions"),
        ({"sglang_attention_backend": "fa3"}, "H200", "reads the cache of this backend"),
    ],
)
def test_sglang_is_refused_where_it_computes_otherwise(options, gpu, because):
    with pytest.raises(PlanError, match=because):
        plan(["true_on_policy"], [f"gpu={gpu}"], **{**SGLANG, **options})


def test_sglang_runs_the_kernels_of_the_trainer():
    accepted = plan(["true_on_policy", "r3"], ["gpu=H200"], **SGLANG)
    assert (
        accepted.fact("sglang.model_impl") == "transformers" and accepted.fact("sglang.attention_backend") == "triton"
    )
    assert accepted.fact("sglang.disable_cuda_graph") and accepted.fact("sglang.enable_deterministic_inference")
    assert plan([], ["gpu=H200"], **SGLANG).fact("sglang.model_impl") != "transformers"


def test_a_hopper_gpu_is_accepted():
    assert "true_on_policy" in plan(["true_on_policy"], ["gpu=H200"], device="cuda", dtype="bfloat16").order


def test_the_cpu_of_a_machine_with_another_gpu_is_the_fix():
    with pytest.raises(PlanError) as refusal:
        plan(["true_on_policy"], ["gpu=B200"], device="cuda")
    assert "\n    --device cpu\n" in str(refusal.value) and "--device auto" not in str(refusal.value)
    assert "true_on_policy" in plan(["true_on_policy"], ["gpu=B200"], device="cpu").order


def test_native_fp8_products_of_one_order_are_accepted():
    options = {"device": "cuda", "dtype": "bfloat16", "rollout_fp8": True, "train_fp8": True, "fp8_fixed_order": True}
    assert "fp8" in plan(["true_on_policy", "fp8"], ["gpu=H200"], **options).order


def test_its_flag_enables_it():
    assert "true_on_policy" in plan(true_on_policy_mode=True).order


def test_a_chain_of_drafts_is_accepted(tmp_path):
    policy = tiny_checkpoint("qwen3", tmp_path / "policy", intermediate_size=1024)
    options = {
        "hf_checkpoint": policy,
        "draft_model_path": tiny_checkpoint("qwen3", tmp_path / "draft"),
        "spec_topk": 1,
    }
    assert "speculative" in plan(["true_on_policy", "speculative"], **options).order
