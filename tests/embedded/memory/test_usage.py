"""What the embedded trainer and engine hold, by hand and against the trainer itself; plans that cannot fit are refused."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from miles_core.plugin import CheckpointError, Facts, PlanError
from miles_core.plugin.detect import config_facts
from miles_core.plugin.facts import Fact
from miles_embedded.memory.model_size import model_size
from miles_embedded.memory.state_size import StateSize
from miles_embedded.memory.usage import (
    Training,
    activations,
    engine_usage,
    longest_sample,
    state_activations,
    trainer_parts,
    training_of,
)
from miles_embedded.testing import families
from miles_testing import plan

PUBLISHED = Path(__file__).parents[2] / "published"
WORK = {"tokens": 1000, "recompute": True, "reference": False}


def size_of(name):
    config = json.loads((PUBLISHED / f"{name}.json").read_text())
    facts = {fact.name: fact.value for fact in config_facts(config)}
    return model_size(config, facts["model.moe_layers"])


SIZE = size_of("qwen3-4b")


def test_no_sample_is_longer_than_the_model_s_context():
    def longest(**given):
        values = {"model.context": 40960} | {f"rollout.{name}": value for name, value in given.items()}
        return longest_sample(Facts([Fact(name, value, "test") for name, value in values.items()]))

    assert longest(max_response_len=8192)[0] == 9216
    assert longest(max_response_len=8192, max_prompt_len=2048) == (10240, "longest prompt and response")
    tokens, why = longest(max_response_len=65536)
    assert tokens == 40960 and "where responses end although --rollout-max-response-len is 65,536" in why
    tokens, why = longest(max_response_len=65536, max_context_len=70000)
    assert tokens == 70000 and "warning: the model's context in config.json has 40,960" in why


@pytest.mark.parametrize(("width", "per"), [(2, (2, 4, 12)), (4, (4, 4, 8))])
def test_one_rank_holds_copies_gradients_masters_and_moments(width, per):
    parts = trainer_parts(SIZE, Training(width, 1, False, **WORK))
    assert (parts.weights, parts.gradients, parts.optimizer) == tuple(n * SIZE.parameters for n in per)


def test_offloaded_state_is_there_when_the_activations_are_not():
    how = Training(2, 1, False, **WORK, state=2.0, offload=True)
    kept, parts = activations(SIZE, how), trainer_parts(SIZE, how)
    assert 0 < kept < 6 * SIZE.parameters
    assert parts.optimizer + parts.activations == 6 * SIZE.parameters
    plain = trainer_parts(SIZE, Training(2, 1, False, **WORK, state=2.0))
    assert plain.optimizer == 6 * SIZE.parameters


def test_no_shard_keeps_all_and_full_shard_a_share():
    alone, replica, sharded = (
        trainer_parts(SIZE, Training(2, n, s, **WORK)) for n, s in ((1, False), (4, False), (4, True))
    )
    assert replica.optimizer == alone.optimizer and replica.weights == alone.weights
    assert sharded.optimizer == alone.optimizer / 4
    assert sharded.weights == alone.weights / 4 + 2 * (SIZE.embeddings + 2 * SIZE.layer)


def test_recomputation_keeps_the_inputs_of_layers():
    kept, recomputed = (activations(SIZE, Training(2, 1, False, 1000, again, False)) for again in (False, True))
    assert recomputed < kept / 4


def test_only_layers_that_attend_keep_what_attention_keeps():
    plain = dataclasses.replace(SIZE, state=StateSize(0, 0, SIZE.hidden), state_layers=0)
    hybrid = dataclasses.replace(plain, attending=SIZE.layers // 4, state_layers=SIZE.layers - SIZE.layers // 4)
    how = Training(2, 1, False, 1000, False, False)
    saved = activations(plain, how) - activations(hybrid, how)
    assert saved == pytest.approx(1000 * hybrid.state_layers * (3 * SIZE.attention / SIZE.hidden - 4))


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "bamba", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_a_state_keep_what_is_estimated(family, dtype):
    name, values = families.FAMILIES[family]
    names = (
        "hidden_size",
        "intermediate_size",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "mamba_d_head",
        "mamba_d_state",
    )
    config = getattr(transformers, name)(**values | {key: 4 * values[key] for key in names if values.get(key)})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    mixer = next(m for n, m in model.named_modules() if n.rpartition(".")[2] in ("linear_attn", "mamba", "conv"))
    weights = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, 256, config.hidden_size, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixer(x)
    kept = sum(t.untyped_storage().nbytes() for pointer, t in found.items() if pointer not in weights) / x.shape[1]
    size = model_size(config.to_dict(), 0)
    # gated delta rules in plain PyTorch kept more before: the estimate is for newer releases, and for kernels
    least = 0.6 if Version(transformers.__version__) >= Version("5.24") else 0.3
    assert least * kept < state_activations(size, dtype.itemsize) < 1.7 * kept


def test_the_optimizer_s_bytes_are_the_trainer_s(tmp_path):
    from miles_core.train.optimizer import OptimizerConfig
    from miles_embedded import load_model
    from miles_embedded.trainer.optimizer import Optimizer
    from miles_testing import tiny_checkpoint

    model = load_model(tiny_checkpoint("llama", tmp_path / "model"), "bfloat16", "cpu")
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-3))
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)
    gradients = sum(m.grad.nbytes for m in optimizer.masters.values())
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.nbytes for p in model.parameters()) == 2 * count and gradients == 4 * count
    assert sum(t.nbytes for t in optimizer.memory()) == 12 * count


def test_a_cache_includes_the_states_of_its_rows_and_prompts():
    """Qwen3-Next's sizes: 36 of 48 layers with 8,192 channels of four inputs in BF16, and 32 heads of 128 x 128 in FP32."""
    entries = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
               "vocab_size": 151936, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
               "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}  # fmt: skip
    size = model_size({"model_type": "qwen3_next", **entries}, 0)
    state = 36 * (2 * 8192 * 4 + 4 * 32 * 128 * 128)
    given = {
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_context_len": 1000,
        "model.dtype": "bfloat16",
    }
    usage = engine_usage(Facts([Fact(name, value, "") for name, value in given.items()]), size, False)
    assert usage.parts.cache == 32 * 1000 * 2 * 12 * 2 * 2 * 256 + 32 * 2 * state + 4 * state
    assert "5.3 GB of it are states of layers" in usage.note


@pytest.fixture
def checkpoint(tmp_path):
    def write(name):
        shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
        return str(tmp_path)

    return write


def test_a_model_that_cannot_fit_is_refused_with_what_would_do(checkpoint):
    with pytest.raises(PlanError) as error:
        plan(hf_checkpoint=checkpoint("qwen3-30b-a3b"), facts=["hardware=H200"], max_tokens_per_gpu=8192)
    text = str(error.value)
    assert re.search(r"the trainer embedded and the engine embedded need \d{3} GB on each GPU", text)
    assert "61.1 weights + 122.1 gradients + 366.4 optimizer" in text and "gpu.memory_gb = 151" in text
    assert "on 1 machine with 8 GPUs: --runtime ray" in text and "--actor-num-gpus-per-node 8" in text


def test_the_longest_micro_batch_that_fits_is_offered(checkpoint):
    given = {"hf_checkpoint": checkpoint("llama3.1-8b"), "rollout_max_context_len": 512, "facts": ["hardware=B200"]}
    given |= {"rollout_max_response_len": 256, "use_dynamic_batch_size": True}
    with pytest.raises(PlanError) as error:
        plan(max_tokens_per_gpu=32768, **given)
    offered = re.findall(r"^ +(--recompute-activations )?--max-tokens-per-gpu (\d+)$", str(error.value), re.MULTILINE)
    assert offered and all(int(tokens) > 512 for _, tokens in offered), error.value
    for recompute, tokens in offered:
        plan(max_tokens_per_gpu=int(tokens), recompute_activations=bool(recompute), **given)
        with pytest.raises(PlanError, match="need"):
            plan(max_tokens_per_gpu=2 * int(tokens), recompute_activations=bool(recompute), **given)


def test_what_is_offered_is_accepted(checkpoint):
    accepted = plan(
        hf_checkpoint=checkpoint("qwen3-30b-a3b"),
        facts=["hardware=8xH200"],
        max_tokens_per_gpu=8192,
        runtime="ray",
        actor_num_gpus_per_node=8,
        colocate=True,
    )
    (note,) = (n for n in accepted.reviews if n.startswith("memory of a GPU"))
    assert "they take turns on the same GPUs" in note and "8 ranks, full_shard" in note


@pytest.mark.parametrize(("strategy", "good"), [("full_shard", True), ("no_shard", False)])
def test_both_sharding_strategies_are_counted(checkpoint, strategy, good):
    given = {
        "hf_checkpoint": checkpoint("qwen3-32b"),
        "facts": ["hardware=2x8xH200"],
        "runtime": "ray",
        "actor_num_gpus_per_node": 8,
        "sharding_strategy": strategy,
        "recompute_activations": True,
        "rollout_num_gpus": 1,
    }
    if good:
        plan(**given)
    else:
        with pytest.raises(PlanError, match="--sharding-strategy full_shard"):
            plan(**given)


def test_more_rows_than_the_cache_holds_are_refused_with_how_many_it_holds(checkpoint):
    given = {
        "hf_checkpoint": checkpoint("qwen3-4b"),
        "facts": ["hardware=2xH200"],
        "runtime": "ray",
        "rollout_batch_size": 64,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 8192,
        "recompute_activations": True,
        "max_tokens_per_gpu": 10240,
    }
    with pytest.raises(PlanError) as error:
        plan(**given)
    rows = int(re.search(r"--max-running-requests (\d+)", str(error.value))[1])
    assert 8 < rows < 256 and "on 1 machine" not in str(error.value)
    plan(**given, max_running_requests=rows)
    with pytest.raises(PlanError):
        plan(**given, max_running_requests=rows + 4)


def test_absurd_sizes_are_refused_quickly(checkpoint, tmp_path):
    path = Path(checkpoint("qwen3-4b"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 10000000, more than the 2,000"):
        plan(hf_checkpoint=str(path), facts=["hardware=8xH200"])
    with pytest.raises(CheckpointError, match="num_hidden_layers is 10000000, more than the 2,000"):
        plan(hf_checkpoint=str(path), trainer="megatron", facts=["hardware=8xH200", "megatron.ranks=8"])


def test_graphs_are_counted_for_the_rows_that_are_recorded(checkpoint):
    from miles_embedded.engine.prompt_graphs import most_tokens
    from miles_embedded.engine.static_step import padded_rows
    from miles_embedded.memory.usage import graph_bytes, graph_rows, prompt_tokens

    for rows in (1, 3, 8, 9, 48, 64, 65, 128, 129, 256, 500):
        assert graph_rows(rows) == sorted({padded_rows(n) for n in range(1, rows + 1)})
    for parameters in (10**8, 2 * 10**9, 8 * 10**9, 10**12):
        assert prompt_tokens(parameters) == most_tokens(parameters)
    least = 2 * SIZE.vocab * sum(graph_rows(256))  # BF16 logits of every graph
    assert least < graph_bytes(SIZE, 256, 2) < 3 * least
    given = {"hf_checkpoint": checkpoint("qwen3-4b"), "facts": ["hardware=H200"], "rollout_batch_size": 8}
    notes = [
        next(n for n in plan(**given, embedded_disable_cuda_graph=off).reviews if n.startswith("memory of a GPU"))
        for off in (False, True)
    ]
    assert "are CUDA graphs" in notes[0] and "CUDA graphs" not in notes[1]


def test_bytes_of_an_optimizer_and_of_an_engine_s_weights_can_be_set(checkpoint):
    given = {"hf_checkpoint": checkpoint("qwen3-4b"), "facts": ["hardware=8xH200"], "max_running_requests": 8}

    def parts(**more):
        facts = Facts(
            plan(["int4"], **given, rollout_int4=True, runtime="ray", actor_num_gpus_per_node=4, **more).facts
        )
        return trainer_parts(SIZE, training_of(facts)).optimizer, engine_usage(facts, SIZE, shares=False).parts.weights

    (state, weights), (less, fewer) = parts(), parts(optimizer_state_bytes=2, embedded_engine_weight_bytes=1)
    inside = SIZE.parameters - SIZE.embeddings
    assert state - less == pytest.approx(6 / 12 * state) and weights - fewer == inside


@pytest.mark.parametrize(
    ("given", "each"),
    [
        ({"rollout_fp8": True}, 0),
        ({"rollout_fp8": True, "train_fp8": True}, 3),
        ({"rollout_fp8": True, "train_fp8": True, "quantized_dgrad": True}, 4),
        ({"rollout_fp8": True, "train_fp8": True, "quantized_product": "emulated"}, 2),
        ({"rollout_fp8": True, "train_fp8": True, "emulate_precision": True}, 2),
    ],
)
def test_a_trainer_keeps_quantised_values_next_to_its_weights(checkpoint, given, each):
    facts = Facts(plan(["fp8"], hf_checkpoint=checkpoint("qwen3-4b"), facts=["hardware=H200"], **given).facts)
    how = training_of(facts)
    more = trainer_parts(SIZE, how).weights - trainer_parts(SIZE, replace(how, quantised=0)).weights
    assert more == each * (SIZE.parameters - SIZE.embeddings)


@pytest.mark.parametrize(
    ("given", "each"), [({}, 2), ({"quantized_dgrad": True}, 2), ({"quantized_product": "native"}, 3)]
)
def test_a_trainer_keeps_codes_of_experts_only_if_their_products_are_native(given, each):
    options = {"rollout_fp8": True, "train_fp8": True, "device": "cuda", "dtype": "bfloat16", **given}
    assert training_of(Facts(plan(["fp8"], ["hardware=H200"], **options).facts)).quantised == each


@pytest.mark.parametrize(
    ("given", "each"),
    [
        ({}, 1),
        ({"quantized_product": "emulated"}, 2),
        ({"emulate_precision": True}, 2),
        ({"fp8_activation_form": "reciprocal"}, 2),
        ({"facts": ["hardware=B200"]}, 2),
    ],
)
def test_an_engine_holds_codes_only_where_its_products_read_them(checkpoint, given, each):
    asked = {
        "hf_checkpoint": checkpoint("qwen3-4b"),
        "facts": ["hardware=H200"],
        "rollout_fp8": True,
        "recompute_activations": True,
        "max_running_requests": 8,
        "max_tokens_per_gpu": 8192,
    }
    facts = Facts(plan(["fp8"], **{**asked, **given}).facts)
    inside = SIZE.parameters - SIZE.embeddings
    assert engine_usage(facts, SIZE, shares=False).parts.weights == 2 * SIZE.embeddings + each * inside
    assert (
        engine_usage(facts, SIZE, shares=True).parts.weights == each * inside
    )  # a trainer's weights are not quantised
