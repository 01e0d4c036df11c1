"""What a plan says about experts."""

import pytest
import transformers

from miles_core.plugin import ConfigError, PlanError
from miles_testing import tiny_checkpoint

FLAGS = {"moe_capacity_factor": 1.25, "moe_router_bias_update_rate": 0.001, "offload_experts": True}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_dense_model_is_refused(plan, tmp_path, flag):
    dense = tiny_checkpoint("qwen3", tmp_path / "dense")
    with pytest.raises(PlanError, match=r"model.moe[\s\S]*the model has no experts"):
        plan(hf_checkpoint=str(dense), **{flag: FLAGS[flag]})


def test_a_capacity_warns_of_the_mismatch_that_it_creates(plan):
    accepted = plan(moe_capacity_factor=1.25)
    text = str(accepted)
    assert "the engine drops none" in text and "tis" in text
    assert "replayed routes" in str(plan(["r3"], moe_capacity_factor=1.25))
    assert "replayed routes" not in text


@pytest.mark.parametrize(
    ("given", "plugins", "why"),
    [
        ({"offload_experts": True, "colocate": True}, [], "where the experts are already"),
        ({"offload_experts": True, "offload_optimizer": True}, [], "both move optimizer states"),
        ({"offload_experts": True}, ["zero_copy"], "share"),
        ({"offload_experts": True}, ["lora"], "frozen base"),
    ],
)
def test_combinations_without_a_meaning_are_refused(plan, given, plugins, why):
    with pytest.raises(PlanError, match=why):
        plan(plugins, **given)


def test_a_drop_policy_without_a_capacity_is_refused(plan):
    with pytest.raises(ConfigError, match=r"--moe-token-drop-policy position: it needs experts.capacity_factor"):
        plan(["experts"], moe_token_drop_policy="position")


def test_megatron_keeps_experts_on_the_gpu_and_the_refusal_says_what_to_do(plan):
    given = {"trainer": "megatron", "facts": ["hardware=8xH200", "model.type=qwen3_moe"], "runtime": "ray"}
    with pytest.raises(
        PlanError, match=r"contiguous buffers(?s:.*)--expert-model-parallel-size(?s:.*)--optimizer-cpu-offload"
    ):
        plan(offload_experts=True, **given)


def test_several_ranks_do_not_offload(plan):
    with pytest.raises(PlanError, match="one trainer rank"):
        plan(offload_experts=True, runtime="ray", actor_num_gpus_per_node=2)


def test_the_memory_table_counts_what_is_offloaded(plan, tmp_path):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936}
    transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **sizes).save_pretrained(tmp_path)
    given = {
        "hf_checkpoint": str(tmp_path),
        "facts": ["hardware=H200"],
        "max_tokens_per_gpu": 4096,
        "dtype": "bfloat16",
    }
    given |= {"runtime": "ray", "recompute_activations": True}
    with pytest.raises(PlanError, match=r"the trainer embedded needs 5\d\d GB"):
        plan(**given)
    # 29 billion expert parameters: FP32 gradients during the optimizer step, nothing else
    with pytest.raises(PlanError, match=r"the trainer embedded needs 1[45]\d GB"):
        plan(offload_experts=True, **given)
