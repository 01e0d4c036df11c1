"""Training of adapters with a real SGLang, which receives the adapters alone; skipped where none is installed."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.data import WeightUnit
from miles_core.plugin import ConfigError
from miles_formats import Codec, FormatCodec
from miles_formats.convert.conversion import run as convert
from miles_formats.convert.encode import to_format
from miles_fp8.format import Fp8
from miles_int4.format import Int4
from miles_lora import LoraOptions
from miles_lora.adapter import Adapter
from miles_lora.peft_files import adapter_config, names_of
from miles_lora.targets import find_targets
from miles_sglang import installed
from miles_sglang.adapters import adapter_arguments
from miles_sglang.build import assemble
from miles_sglang.choices import Choices
from miles_testing import tiny_checkpoint, toy_run

pytestmark = pytest.mark.skipif(installed.version() is None, reason="SGLang is not installed")

#: What SGLang's kernels take, and a backend for adapters that needs no Triton.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LORA = {"lora_sync": "adapter", "lora_target_modules": "all-linear", "lora_rank": 4, "lr": 2e-2}


TURNS = """
async def generate(args, sample, sampling_params):
    sample.policy = ["solver", "judge"][sample.group_index % 2]
    await args.ask(policy="teacher")
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""


@pytest.mark.thorough  # starts SGLang
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_policies_train_adapters_on_one_sglang(tmp_path, schedule):
    """Each version moves away from the base, and SGLang's log-probabilities of each policy follow its trainer's. With the schedule ``async``
    a policy receives its adapter while requests of the others are in flight."""
    (tmp_path / "turns.py").write_text(TURNS)
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model", 0, **SIZES)
    backend = "triton" if torch.cuda.is_available() else "torch_native"
    policies = {"solver": {"lora": {"rank": 2}}, "judge": {}, "teacher": {"role": "frozen", "generates": True}}
    options = {"engine": "sglang", "sglang_lora_backend": backend, "sglang_max_total_tokens": 4096, "dtype": "float32"}
    options |= {"device": "auto" if torch.cuda.is_available() else "cpu", "kl_loss_coef": 1e-6, "schedule": schedule}
    options |= {"policies": policies, "custom_generate_function_path": tmp_path / "turns.py", "verify_logprobs": True}
    done = toy_run(["lora"], tmp_path / "run", steps=4, hf_checkpoint=checkpoint, **LORA, **options)
    first, last = done.metrics[0], done.metrics[-1]
    assert [part.engine.version for part in done.parts] == [4, 4, 0]
    assert len({id(part.engine.link._use._shared) for part in done.parts}) == 1, "one SGLang"
    for name, part in zip(("solver", "judge"), done.parts, strict=False):
        assert last[f"{name}/train/lora_delta_norm"] > first[f"{name}/train/lora_delta_norm"] > 0
        assert last[f"{name}/train/ref_kl"] > 1e-3, "the adapters change the policy"
        assert all(record[f"{name}/verify/abs_log_prob"] < 1e-3 for record in done.metrics)
        whole = sum(p.nbytes for p in part.learner.rank.trainer.model.parameters())
        assert last[f"{name}/sync/bytes"] < whole / 4


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_adapters_over_an_encoded_base(format, tmp_path, quantized_layers):
    """SGLang reads the codes of the base from the checkpoint, and adds two policies' adapters unrounded: its log-probabilities are those of the
    numbers that the codes stand for plus the adapter. A checkpoint without codes is refused."""
    from transformers import AutoModelForCausalLM

    quantized_layers(format)
    plain = tiny_checkpoint("qwen3", tmp_path / "plain", 0, **SIZES, num_attention_heads=4, num_key_value_heads=2)
    codec, stored = FormatCodec(Fp8() if format == "fp8" else Int4(64)), tmp_path / "stored"
    convert(to_format(CheckpointFiles(plain), codec), stored)
    cuda, sequence = torch.cuda.is_available(), list(range(5, 45))
    arguments = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"], "max_loaded_loras": 3}
    arguments |= {
        "max_loras_per_batch": 3,
        "max_total_tokens": 4096,
        "lora_backend": "triton" if cuda else "torch_native",
    }
    choices = Choices(arguments=arguments, device="cuda" if cuda else "cpu", dtype="bfloat16", max_context=512)
    with pytest.raises(ConfigError, match="is not stored in the rollout's precision"):
        assemble(plain, codec, str, tmp_path, choices, shared={})
    name, base = "model.layers.0.mlp.down_proj.weight", load_file(plain / "model.safetensors")
    rows, columns = base[name].shape
    pairs = [((torch.randn(4, columns) / 4).bfloat16(), (torch.randn(rows, 4) / 4).bfloat16()) for _ in range(2)]

    async def score():
        servers = {}
        engines = [assemble(stored, codec, str, tmp_path, choices, shared=servers) for _ in pairs]
        found = []
        try:
            for number, (engine, (a, b)) in enumerate(zip(engines, pairs, strict=True)):
                await engine.start()
                start = f"base_model.model.{name.removesuffix('weight')}lora_"
                config = {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj"], "peft_type": "LORA"}
                tensors = save({f"{start}A.weight": a, f"{start}B.weight": b})
                await engine.receive({"adapter": f"policy-{number}", "config": config, "tensors": tensors}, 0, True)
            for engine in engines:
                found.append((await engine.score([sequence]))[0])
        finally:
            for engine in engines:
                await engine.stop()
        return found

    units = codec.encode(WeightUnit({n: t}) for n, t in base.items())
    decoded = {unit.name: codec.decode(unit).contiguous() for unit in units}
    scores = asyncio.run(score())
    assert abs(scores[0] - scores[1]).mean() > 0.1, "the adapters differ"
    for (a, b), found in zip(pairs, scores, strict=True):
        summed = {**decoded, name: (decoded[name].float() + 2 * (b.float() @ a.float())).to(decoded[name].dtype)}
        save_file(summed, plain / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert (torch.from_numpy(found) - expected).abs().mean() < 0.05  # BF16 noise


@pytest.mark.thorough  # starts SGLang
def test_adapters_of_experts(tmp_path, quantized_layers):
    """SGLang adds two policies' adapters of joined experts: its log-probabilities are those of base plus adapter."""
    from transformers import AutoModelForCausalLM

    quantized_layers("experts")
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model", 0, **SIZES, moe_intermediate_size=64)
    cuda, sequence = torch.cuda.is_available(), list(range(5, 45))
    backend = "triton" if cuda else "torch_native"
    arguments = {**adapter_arguments([LoraOptions(rank=4, target_modules=("all-experts",))] * 2, experts=True)}
    arguments |= {"max_total_tokens": 4096, "lora_backend": backend, "moe_runner_backend": "triton"}
    choices = Choices(arguments=arguments, device="cuda" if cuda else "cpu", dtype="float32", max_context=512)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    targets, pairs, generator = find_targets(model, ["all-experts"]), [], torch.Generator().manual_seed(0)
    for _ in range(2):
        adapters = {t.source: Adapter(getattr(t.module, t.attribute), LoraOptions(rank=4)) for t in targets}
        for adapter in adapters.values():
            for matrix in adapter.parameters():
                matrix.data = torch.randn(matrix.shape, generator=generator) / 4
        pairs.append(adapters)

    def message(number):
        starts = names_of(targets)
        tensors = {
            f"{starts[n]}lora_{x}.weight": getattr(a, f"lora_{x}").data for n, a in pairs[number].items() for x in "AB"
        }
        config = adapter_config(targets, LoraOptions(rank=4), str(checkpoint), model)
        return {"adapter": f"policy-{number}", "config": config, "tensors": save(tensors)}

    async def score():
        servers, found = {}, []
        engines = [assemble(checkpoint, Codec(), str, tmp_path, choices, shared=servers) for _ in pairs]
        try:
            for number, engine in enumerate(engines):
                await engine.start()
                await engine.receive(message(number), 0, True)
            for engine in engines:
                found.append((await engine.score([sequence]))[0])
        finally:
            for engine in engines:
                await engine.stop()
        return found

    scores = asyncio.run(score())
    assert abs(scores[0] - scores[1]).mean() > 0.1, "the adapters differ"
    for adapters, found in zip(pairs, scores, strict=True):
        summed = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            for name, adapter in adapters.items():
                parameter = summed.get_parameter(name)
                parameter.copy_(adapter(parameter))
            logits = summed(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-3
