"""Models that do not divide among the GPUs of an engine: refused by the plan, and not proposed by a search."""

import json
import shutil
from pathlib import Path

import pytest

from miles_core.plugin import Fact, Facts, PlanError
from miles_core.plugin.detect import config_facts
from miles_sglang.division import find_undivided
from miles_testing import plan

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"


def undivided(name, **given):
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    options = {"engine": "sglang", "rollout.precision": "fp8"} | {key.replace("__", "."): v for key, v in given.items()}
    return list(
        find_undivided(Facts([*config_facts(config), *(Fact(key, v, "test") for key, v in options.items())]), config)
    )


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        # "192 is not divisible by weight quantization block_n = 128": vLLM's issue 17569, for SGLang Qwen3's issue 1485
        ("qwen3-235b-a22b", {"tp_size": 8}, ["1536 inner units of an expert by 8, in whole FP8 blocks of 128"]),
        ("qwen3-235b-a22b", {"tp_size": 4}, []),
        ("qwen3-235b-a22b", {"tp_size": 8, "ep_size": 8}, []),
        ("qwen3-235b-a22b", {"tp_size": 8, "ep_size": 3}, ["--sglang-tp-size 8 by --sglang-ep-size 3"]),
        ("qwen3-30b-a3b", {"tp_size": 4}, ["768 inner units of an expert by 4, in whole FP8 blocks of 128"]),
        ("deepseek-v3", {"tp_size": 16}, []),
        ("deepseek-v3", {"tp_size": 32, "moe_a2a_backend": "deepep", "moe_dense_tp_size": 1}, []),
        ("deepseek-v3", {"tp_size": 32, "dp_size": 32, "enable_dp_attention": True, "moe_dense_tp_size": 1},
         ["2048 inner units of an expert by 32, in whole FP8 blocks of 128"]),
        ("qwen3-32b", {"tp_size": 3}, ["64 attention heads by 3", "8 heads of keys and values by 3", "25600 inner units of a dense layer by 3, "
                                       "in whole FP8 blocks of 128"]),
    ],
)  # fmt: skip
def test_what_sglang_could_not_start_is_found(name, given, found):
    assert undivided(name, **{f"sglang__{key}": value for key, value in given.items()}) == found


def test_blocks_matter_only_for_layers_in_fp8():
    assert not undivided("qwen3-235b-a22b", sglang__tp_size=8, rollout__precision="bf16")
    assert not undivided("qwen3-235b-a22b", sglang__tp_size=8, precision__extra_high_precision_layers=("experts",))


def test_the_plan_refuses_them_and_its_fixes_work(tmp_path):
    shutil.copy(PUBLISHED / "qwen3-235b-a22b.json", tmp_path / "config.json")
    given = {
        "runtime": "ray", "engine": "sglang", "trainer": "megatron", "hf_checkpoint": str(tmp_path), "facts": ["hardware=64xH200"],
        "rollout_precision": "fp8", "actor_num_nodes": 4, "actor_num_gpus_per_node": 8, "expert_model_parallel_size": 32,
        "recompute_granularity": "full", "optimizer_cpu_offload": True, "rollout_num_gpus_per_engine": 8,
    }  # fmt: skip
    with pytest.raises(PlanError) as refused:
        plan(**given)
    text = str(refused.value)
    assert "1536 inner units of an expert by 8" in text and "every GPU holds an equal part" in text
    assert "--rollout-num-gpus-per-engine 4\n" in text and "--sglang-ep-size 8\n" in text
    plan(**{**given, "rollout_num_gpus_per_engine": 4})
    plan(**given, sglang_ep_size=8)
