"""What the plan refuses, what it counts, and what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from miles_core.plugin import ConfigError, Fact, Facts, MilesError, PlanError
from miles_core.plugin.detect import config_facts
from miles_embedded import size_of
from miles_embedded.testing import families
from miles_lora.memory import adapter_parameters
from miles_lora.targets import find_targets
from miles_testing import plan, toy_run

pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

HYBRIDS = ("qwen3_next", "kimi_linear", "olmo_hybrid", "bamba", "jamba")

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"
RETRACT = {"pause_generation_mode": "retract", "mask_offpolicy_in_partial_rollout": True}
BOTH = {"train_precision": "fp8", "rollout_precision": "fp8", "emulate_precision": True}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_rank": 0}, "--lora-rank.*0.*>= 1"),
        ({"lora_dropout": 1.0}, "--lora-dropout"),
        ({"lora_sync": "sometimes"}, "merged or adapter"),
        (
            {"plugins": ["lora", "fp8"], **BOTH, "lora_sync": "merged"},
            "engine and trainer read the same codes of the frozen base",
        ),
        (
            {"plugins": ["lora", "fp8"], **BOTH, "lora_sync": "adapter", "warmup_steps": 2},
            "cannot be BF16 during a warm-up",
        ),
        ({"trainer": "megatron", "lora_sync": "adapter"}, "computes with base plus adapter as one matrix"),
        ({"trainer": "megatron", "lora_dropout": 0.1}, "adds adapters to matrices and not to outputs"),
        ({"engine": "sglang", "lora_sync": "adapter", "colocate": True}, "does not bring the base back"),
        (
            {
                "engine": "sglang",
                "lora_sync": "adapter",
                "pause_generation_mode": "retract",
                "schedule": "async",
                "mask_offpolicy_in_partial_rollout": True,
            },
            "which is unloaded",
        ),
        (
            {"plugins": ["lora", "fp8"], "engine": "sglang", "lora_sync": "adapter", "rollout_precision": "fp8"},
            "nothing sends it the encoded base",
        ),
    ],
)
def test_the_plan_says_why_not(options, why):
    with pytest.raises((PlanError, ConfigError), match=f"(?s){why}"):
        plan(**{"plugins": ["lora"], **options})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_target_modules": "q_project"}, "--lora-target-modules q_project: .*'q_project'; did you mean q_proj"),
        ({"lora_target_modules": "lm_head"}, "end in 'lm_head'; they have q_proj, k_proj"),
        ({"lora_target_modules": "all-experts", "family": "llama"}, "LlamaForCausalLM has no joined experts"),
        (
            {"lora_target_modules": "experts.down_proj", "lora_dropout": 0.1},
            "whose inputs cannot be dropped separately",
        ),
        ({"lora_adapter": "/nowhere"}, "--lora-adapter /nowhere: adapter_config.json cannot be read"),
    ],
)
def test_the_checkpoint_is_looked_at_before_a_model_is_loaded(options, why):
    with pytest.raises(MilesError, match=why):
        toy_run(["lora"], **options)


def test_policies_without_adapters_have_no_options_of_adapters(tmp_path):
    for role, why in (
        ("critic", "its value head needs a trunk of its own"),
        ("frozen", "computes with the base alone"),
    ):
        (tmp_path / "roles.yaml").write_text(f"policies: {{solver: {{}}, other: {{role: {role}, lora: {{rank: 4}}}}}}")
        with pytest.raises(PlanError, match=f"(?s)no adapter options for the policy other.*{why}"):
            plan(["lora"], config=tmp_path / "roles.yaml")


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "big").mkdir()
    shutil.copy(PUBLISHED / "qwen3-30b-a3b.json", tmp_path / "big" / "config.json")
    return tmp_path / "big"


def test_a_model_that_full_training_cannot_hold_fits_with_adapters(checkpoint):
    """30 billion parameters on one H100 (80 GB): adapters over a BF16 base shared with the engine, or over four bits on 48 GB."""
    given = {
        "hf_checkpoint": checkpoint,
        "max_tokens_per_gpu": 8192,
        "device": "cuda",
        "recompute_activations": True,
    }
    given |= {"rollout_max_context_len": 4096}
    with pytest.raises(PlanError, match="memory"):
        plan(facts=["hardware=H100"], **given)
    accepted = plan(["lora"], facts=["hardware=H100"], lora_sync="adapter", **given)
    assert "frozen base of 30.5 billion parameters (bf16)" in json.dumps(accepted.record()) + str(accepted)
    with pytest.raises(PlanError, match="memory"):
        plan(["lora"], facts=["hardware=H100"], **given)  # the engine has a second copy
    four = {"train_precision": "int4", "rollout_precision": "int4", "lora_sync": "adapter"}
    plan(["lora", "int4"], facts=["hardware=L40S"], **given, **four)


def test_a_critic_next_to_adapters_counts_in_full(checkpoint):
    given = {"hf_checkpoint": checkpoint, "max_tokens_per_gpu": 8192, "device": "cuda", "rollout_max_context_len": 4096}
    given |= {"recompute_activations": True, "lora_sync": "adapter", "facts": ["hardware=H200"]}
    plan(["lora"], **given)
    with pytest.raises(PlanError, match=r"need [0-9]+ GB on each GPU"):
        plan(["lora"], advantage_estimator="ppo", **given)


@pytest.mark.parametrize("family", [name for name in HYBRIDS if not families.lacking(name)])
def test_adapters_of_hybrid_models_are_those_that_peft_makes(family):
    """Only some layers of these models attend, and only some keep a state: the estimate is at least peft's count, and of its order."""
    name, values = families.FAMILIES[family]
    wide = {key: value * 8 if key in ("hidden_size", "head_dim") else value for key, value in values.items()}
    config = getattr(transformers, name)(**wide)
    for targets in (("q_proj", "v_proj"), ("k_proj", "o_proj", "in_proj")):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=list(targets)))
        made = sum(weight.numel() for key, weight in adapted.named_parameters() if "lora_" in key)
        given = [Fact("lora.rank", 4, ""), Fact("lora.target_modules", ",".join(targets), "")]
        facts = Facts([*config_facts(config.to_dict()), *given])
        assert made <= adapter_parameters(facts, size_of(facts, config.to_dict())) <= 8 * made


@pytest.mark.parametrize("targets", [("all-linear",), ("all-linear", "all-experts")])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "olmo_hybrid", "bamba"])
def test_adapters_of_narrow_matrices_are_not_estimated_too_small(family, targets):
    """The inner sizes of shared and routed experts and of states are a small part of the hidden size."""
    name, values = families.FAMILIES[family]
    config = getattr(transformers, name)(**values | {"hidden_size": 8 * values["hidden_size"]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    chosen = targets if families.FAMILIES[family][1].get("num_experts") else ("all-linear",)
    shapes = [getattr(target.module, target.attribute).shape for target in find_targets(model, chosen)]
    made = 4 * sum((shape[0] if len(shape) == 3 else 1) * (shape[-1] + shape[-2]) for shape in shapes)
    facts = Facts(
        [*config_facts(config.to_dict()), Fact("lora.rank", 4, ""), Fact("lora.target_modules", ",".join(chosen), "")]
    )
    assert made <= adapter_parameters(facts, size_of(facts, config.to_dict())) <= 3 * made


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_a_base_larger_than_a_gpu_is_divided_among_the_gpus_of_a_process(name, tmp_path):
    """671 and 1,030 billion parameters on 8 x H200: refused with the flag that divides the experts, and accepted with it."""
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    config.pop("auto_map", None)
    config.pop("quantization_config", None)
    # Kimi-K2 has the architecture of DeepSeek-V3 under a name that needs the checkpoint's own code
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    given = {
        "plugins": ["lora", "int4"],
        "facts": ["hardware=8xH200"],
        "hf_checkpoint": tmp_path,
        "device": "cuda",
        "recompute_activations": True,
        "lora_target_modules": "all-linear",
        "rollout_max_context_len": 4096,
        "kv_cache_dtype": "float8_e4m3fn",
        "max_running_requests": 4,
        "max_tokens_per_gpu": 8192,
        "train_precision": "int4",
        "rollout_precision": "int4",
    }
    with pytest.raises(PlanError, match=r"(?s)for its part of the base.*this would do:.*--lora-base-gpus 8"):
        plan(**given)
    text = str(plan(**given, lora_base_gpus=8))
    assert "one copy of the frozen base is held, with experts on 8 GPUs" in text
    assert "experts are divided among 8 GPUs, and each of the others needs" in text
    assert "GB with gradients and optimizer state" in text and "the host holds one of its parameters at a time" in text
    with pytest.raises(PlanError, match="16 GPUs"):
        plan(**given, lora_base_gpus=16)
    more = given | {"lora_base_gpus": 8, "rollout_max_context_len": 8192, "max_running_requests": 64}
    with pytest.raises(PlanError, match=r"this would do:\s+--max-running-requests \d+$") as refused:
        plan(**more)
    plan(**more | {"max_running_requests": int(str(refused.value).split()[-1])})


def test_the_plan_estimates_the_adapters_of_the_chosen_targets():
    """A plan has the targets as one text."""
    counts = []
    for targets in ("q_proj,v_proj", "all-linear", "all-linear,all-experts"):
        facts = Facts(plan(["lora"], lora_target_modules=targets).facts)
        config = json.loads((Path(str(facts.value("model.hf_checkpoint"))) / "config.json").read_text())
        counts.append(adapter_parameters(facts, size_of(facts, config)))
    assert counts[0] < counts[1] < counts[2]
