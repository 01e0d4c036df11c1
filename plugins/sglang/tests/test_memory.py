"""Memory of an SGLang engine in the plan, by hand, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from miles_core.plugin import Fact, Facts, PlanError
from miles_core.plugin.detect import config_facts
from miles_embedded import model_size
from miles_sglang.memory import GB, MIB, default_share, server_of, usage, weight_bytes, weights_on_gpu
from miles_testing import plan

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"
ENGINE = {"runtime": "ray", "engine": "sglang", "rollout_num_gpus_per_engine": 8, "recompute_activations": True}


@pytest.fixture
def checkpoint(tmp_path):
    def write(name):
        (tmp_path / name).mkdir(exist_ok=True)
        shutil.copy(PUBLISHED / f"{name}.json", tmp_path / name / "config.json")
        return str(tmp_path / name)

    return write


def size_of(name):
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    facts = {fact.name: fact.value for fact in config_facts(config)}
    return model_size(config, facts["model.moe_layers"], facts["model.mtp_layers"])


def test_formats_store_linear_layers_and_leave_embeddings():
    size = size_of("deepseek-v3")
    assert weight_bytes(size, "bf16") == 2 * size.parameters
    assert weight_bytes(size, "fp8") == pytest.approx(size.parameters + size.embeddings, rel=0.001)
    assert weight_bytes(size, "nvfp4") == pytest.approx(2 * (size.parameters - size.experts) + 0.5625 * size.experts)


def engine_alone(checkpoint, name, hardware, **options):
    """A plan whose trainer fits whatever the model: Megatron on many machines."""
    given = {
        **ENGINE,
        "trainer": "megatron",
        "actor_num_nodes": 64,
        "actor_num_gpus_per_node": 8,
        "micro_batch_size": 1,
    }
    sizes = {
        "expert_model_parallel_size": 64,
        "tensor_model_parallel_size": 8,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    }
    del given["recompute_activations"]
    return plan(
        hf_checkpoint=checkpoint(name),
        facts=[f"hardware=65x{hardware}"],
        **{**given, **sizes, "recompute_granularity": "full", **options},
    )


def test_deepseek_in_bf16_is_refused_on_eight_h200_and_fp8_is_not(checkpoint):
    with pytest.raises(PlanError) as error:
        engine_alone(checkpoint, "deepseek-v3", "8xH200")
    text = str(error.value)
    assert "sglang needs an engine that fits the model" in text and "bf16 weights = 1342.1 GB" in text
    assert "--rollout-precision fp8" in text
    accepted = engine_alone(checkpoint, "deepseek-v3", "8xH200", plugins=["fp8"], rollout_precision="fp8")
    (note,) = (n for n in accepted.reviews if n.startswith("memory of a GPU"))
    held = float(re.search(r"engine, GPU +([\d.]+)", note)[1])
    assert held == pytest.approx(weight_bytes(size_of("deepseek-v3"), "fp8") / 8 / GB, abs=0.1)
    assert "fp8 weights on 8 GPUs" in note


def test_a_cache_of_less_than_one_sequence_is_refused_with_another_share(checkpoint):
    given = {"rollout_num_gpus_per_engine": 2, "rollout_max_response_len": 30000, "actor_num_gpus_per_node": 4}
    common = {
        **ENGINE,
        **given,
        "hf_checkpoint": checkpoint("qwen3-30b-a3b"),
        "facts": ["hardware=8xH200"],
        "max_tokens_per_gpu": 31024,
    }
    del common["recompute_activations"]
    with pytest.raises(PlanError, match=r"the cache of one sequence of 31,024 tokens") as error:
        plan(**common, sglang_mem_fraction_static=0.2)
    assert re.search(r"--sglang-mem-fraction-static 0\.\d", str(error.value)) or "no small change" in str(error.value)


def test_tensor_parallel_ranks_are_the_engine_s_gpus(checkpoint):
    with pytest.raises(PlanError, match=r"--sglang-tp-size x --sglang-pp-size = 8, the GPUs of an engine"):
        engine_alone(checkpoint, "qwen3-30b-a3b", "8xH200", sglang_tp_size=4)
    accepted = engine_alone(checkpoint, "qwen3-235b-a22b", "8xH200", tensor_model_parallel_size=4)
    assert any("bf16 weights on 8 GPUs" in note for note in accepted.reviews)


def test_the_default_share_leaves_sglang_s_reserve():
    from miles_core.plugin import Facts

    server = server_of(Facts(), 141 * GB)
    assert server.reserve == pytest.approx((512 + 1.5 * 8192 + 128 + 512) * MIB)
    assert server.fraction == pytest.approx(1 - server.reserve / (141 * GB))


def test_a_colocated_engine_leaves_memory_to_a_sleeping_trainer_by_default(checkpoint):
    given = {"hf_checkpoint": checkpoint("qwen3-0.6b"), "engine": "sglang", "colocate": True}
    for hardware in ("1xA100", "1xH100", "1xH200"):
        (table,) = (n for n in plan(**given, facts=[f"hardware={hardware}"]).reviews if n.startswith("memory of a GPU"))
        assert "0.80 of each for weights and cache (default on a trainer's GPU)" in table
    (table,) = plan(**given, facts=["hardware=1xH200"], sglang_mem_fraction_static=0.7).reviews
    assert "0.70 of each for weights and cache (--sglang-mem-fraction-static 0.7)" in table
    assert [default_share("inline", False), default_share("ray", True), default_share("ray", False)] == [0.4, 0.8, None]


def test_the_note_on_the_cache_and_the_size_read_like_sentences(checkpoint):
    """Room for more sequences than there are, and a model of more than 1,000 billion parameters."""
    few = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 1000}
    (table,) = (
        n
        for n in engine_alone(checkpoint, "qwen3-30b-a3b", "8xH200", tensor_model_parallel_size=4, **few).reviews
        if "memory of a GPU" in n
    )
    assert re.search(r"the cache holds [\d,]+ tokens, enough for all 4 of the engine's concurrent sequences", table)
    many = {"rollout_batch_size": 512, "n_samples_per_prompt": 8, "rollout_max_response_len": 30000}
    (table,) = (
        n
        for n in engine_alone(checkpoint, "qwen3-30b-a3b", "8xH200", tensor_model_parallel_size=4, **many).reviews
        if "memory of a GPU" in n
    )
    assert re.search(r"enough for \d+ of up to 256 concurrent sequences", table)
    with pytest.raises(PlanError, match="1,030 billion parameters"):
        engine_alone(checkpoint, "kimi-k2", "8xH200")


def test_with_data_parallel_attention_the_cache_is_that_of_all_gpus():
    sizes = {
        "model.moe_layers": 58,
        "gpu.memory_gb": 151,
        "engine": "sglang",
        "sglang.tp_size": 16,
        "sglang.mem_fraction_static": 0.8,
    }
    config = json.loads((PUBLISHED / "deepseek-v3.json").read_text())
    held = {}
    for dp in (1, 16):
        split = {"sglang.dp_size": dp, "sglang.enable_dp_attention": True}
        (engine,) = usage(facts_of(**sizes, **split), config)
        tokens = int(re.search(r"the cache holds ([\d,]+) tokens", engine.note)[1].replace(",", ""))
        held[dp] = tokens, engine.parts.cache / (2 * 576 * 61)
    assert held[1][0] == pytest.approx(held[1][1], rel=1e-3)
    assert held[16][0] == pytest.approx(16 * held[16][1], rel=1e-3)


def test_an_engine_that_leaves_less_than_the_margin_free_gets_a_warning(checkpoint):
    """SGLang's default share plus its own reserve is the whole GPU."""

    def note(**options):
        return next(
            text
            for text in engine_alone(
                checkpoint, "qwen3-30b-a3b", "8xH200", tensor_model_parallel_size=4, **options
            ).reviews
            if "process" in text
        )

    full = note()
    assert "warning: it fills 151.0 of 151 GB" in full and "less than 3% stay free" in full
    share = float(full.split("--sglang-mem-fraction-static ")[1].split()[0])
    assert "warning" not in note(sglang_mem_fraction_static=share) and "warning" in note(
        sglang_mem_fraction_static=share + 0.02
    )
    assert "warning" not in note(sglang_mem_fraction_static=0.7)


def facts_of(**given):
    named = {
        "engine": "sglang",
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_context_len": 1000,
    }
    return Facts([Fact(name, value, "") for name, value in {**named, **given}.items()])


def test_states_of_hybrid_models_are_part_of_the_cache():
    """Qwen3-Next: 36 of 48 layers with 8,192 channels of four inputs in BF16, and 32 heads of 128 x 128 in FP32; split by two GPUs."""
    config = {"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
              "head_dim": 256, "vocab_size": 151936, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
              "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}  # fmt: skip
    (found,) = usage(facts_of(**{"sglang.tp_size": 2}), config)
    state = 36 * (2 * 8192 * 4 + 4 * 32 * 128 * 128) / 2
    assert found.parts.cache == 32 * (1000 * 2 * 12 * 2 * 2 * 256 / 2 + state)
    assert f"the states of a sequence take {state / 1e6:.1f} MB of it" in found.note
    (found,) = usage(
        facts_of(**{"gpu.memory_gb": 141, "rollout.batch_size": 10**4, "rollout.max_running_requests": 10**5}), config
    )
    fitting = int(found.parts.cache // (1000 * 2 * 12 * 2 * 2 * 256 + 2 * state))
    assert f"enough for {fitting:,} of up to" in found.note


def test_a_model_without_attention_has_a_cache_of_states_only():
    config = {"model_type": "mamba2", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000, "state_size": 16, "num_heads": 8,
              "head_dim": 64, "expand": 2, "conv_kernel": 4, "n_groups": 1}  # fmt: skip
    (found,) = usage(facts_of(**{"gpu.memory_gb": 80}), config)
    assert "enough for all 32 of the engine's" in found.note


def test_a_tower_is_part_of_the_weights():
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 99,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    tower = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "patch_size": 14, "out_hidden_size": 64}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower}
    one, other = model_size(config, 0), model_size({**config, "vision_config": None}, 0)
    facts = Facts([Fact("sglang.tp_size", 2, "test")])
    layer = 4 * 128**2 + 2 * 128 * 256
    merger = 128 * 128 + 128 * 64  # spatial_merge_size is 1
    expected = 2 * layer + 3 * 14**2 * 128 + merger
    found = weights_on_gpu(facts, one, server_of(facts, 0.0)) - weights_on_gpu(facts, other, server_of(facts, 0.0))
    assert found == 2 * expected / 2
