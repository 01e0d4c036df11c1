"""Adapters are trained, and everything that leaves the trainer has them merged in, or consists of them."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("peft")

from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core.plugin import CheckpointError, ConfigError
from miles_testing import WeightsContract, toy_run

EVERY = "all-linear,all-experts"
MERGED = {"lora_target_modules": EVERY, "lr": 1e-2}
SEPARATE = {**MERGED, "lora_sync": "adapter"}


class TestMerged(WeightsContract):
    plugins = ("lora",)
    options = MERGED


@pytest.mark.thorough
class TestSeparate(WeightsContract):
    plugins = ("lora",)
    options = SEPARATE


def checkpoint_of(done, step):
    return done.directory / "checkpoints" / f"step_{step:08}" / "policy"


def numbers(done):
    return [{n: v for n, v in r.items() if n.startswith(("train/", "reward/"))} for r in done.metrics]


def scores(model, done):
    """Log-probabilities that a Transformers model gives the last samples, next to the trainer's."""
    rows = []
    for sample in done.samples[-4:]:
        tokens = torch.tensor([sample["tokens"]])
        with torch.no_grad():
            found = model(tokens).logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        rows.append(found[-sample["response_length"] :])
    return torch.cat(rows)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A run that sends merged weights and exports them."""
    hf = tmp_path_factory.mktemp("merged") / "hf"
    return toy_run(["lora"], steps=3, lr=1e-2, lora_target_modules=EVERY, export_hf=hf, verify_logprobs=True), hf


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The same run with adapters that travel alone."""
    hf = tmp_path_factory.mktemp("separate") / "hf"
    options = {"lora_target_modules": EVERY, "lora_sync": "adapter", "verify_logprobs": True}
    return toy_run(["lora"], steps=3, lr=1e-2, export_hf=hf, **options), hf


def test_engine_trainer_and_export_agree(merged):
    done, hf = merged
    assert all(record["verify/abs_log_prob"] < 1e-5 for record in done.metrics)
    trained = {n for n, p in done.trainer.model.named_parameters() if p.requires_grad}
    assert done.metrics[-1]["verify/moved"] > 0.99 and trained and all(".lora." in name for name in trained)
    start, exported = (
        load_file(done.run.policy.hf_checkpoint + "/model.safetensors"),
        load_file(hf / "model.safetensors"),
    )
    assert exported.keys() == start.keys()
    moved = {n for n in exported if not torch.equal(exported[n], start[n])}
    # every linear layer and every expert, but neither routers and norms nor embeddings
    assert moved == {n for n in start if n.endswith("_proj.weight")}
    plain = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(done.engine.model.get_parameter(name), parameter, rtol=0, atol=1e-6)


def test_adapters_alone_train_the_same_and_travel_in_few_bytes(merged, separate):
    done, hf = separate
    ours, theirs = numbers(done), numbers(merged[0])
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5)
    parameters = [p for p in done.trainer.model.parameters() if p.requires_grad]
    assert done.metrics[-1]["sync/bytes"] == sum(p.nbytes for p in parameters) < merged[0].metrics[-1]["sync/bytes"] / 3
    assert (
        all(record["verify/abs_log_prob"] < 1e-5 for record in done.metrics) and done.metrics[-1]["verify/moved"] > 0.99
    )
    for name, tensor in load_file(hf / "model.safetensors").items():  # a merged export of the same weights
        torch.testing.assert_close(tensor, load_file(merged[1] / "model.safetensors")[name], rtol=0, atol=1e-4)
    engine, trainer = (dict(m.named_parameters()) for m in (done.engine.model, done.trainer.model))
    for name, parameter in trainer.items():  # one base in memory
        assert (engine[name].data_ptr() == parameter.data_ptr()) is not parameter.requires_grad, name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_peft_loads_what_a_checkpoint_holds(family, merged, tmp_path):
    """peft's own model with the adapter gives the log-probabilities of the merged export, in every layout of joined experts."""
    done, hf = merged
    if family != "qwen3_moe":
        hf = tmp_path / "hf"
        options = {"lora_target_modules": EVERY, "lora_use_rslora": True, "export_hf": hf}
        done = toy_run(["lora"], steps=1, lr=1e-2, family=family, **options)
    directory = checkpoint_of(done, done.run.step) / "plugins" / "lora"
    base = AutoModelForCausalLM.from_pretrained(done.run.policy.hf_checkpoint, dtype=torch.float32)
    before = scores(base, done)
    adapted = PeftModel.from_pretrained(base, directory)
    exported = scores(AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32), done)
    torch.testing.assert_close(scores(adapted, done), exported, rtol=0, atol=1e-5)
    assert not torch.allclose(before, exported, atol=1e-3)
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16) and "q_proj" in config["target_modules"]


def test_checkpoints_hold_adapters_only_and_resume_bit_for_bit(merged, separate):
    for done, _ in (merged, separate):
        held = load_file(checkpoint_of(done, 3) / "trainer" / "model.safetensors")
        assert held and all(".lora." in name for name in held)
    options = {"lora_target_modules": EVERY, "lora_sync": "adapter", "lr": 1e-2, "verify_logprobs": True}
    first = toy_run(["lora"], steps=2, **options)
    second = toy_run(["lora"], steps=3, load=first.directory, save=None, directory=None, **options)
    assert numbers(second)[-1] == numbers(separate[0])[-1]
    for name, parameter in separate[0].trainer.model.named_parameters():
        assert torch.equal(second.trainer.model.get_parameter(name), parameter), name
    with pytest.raises(CheckpointError, match=r"lora\.rank was 8, is now 4"):
        toy_run(["lora"], steps=3, load=first.directory, save=None, directory=None, **options, lora_rank=4)


def test_an_exported_adapter_is_a_start(merged, tmp_path):
    """The adapter that one run exports is what the next run starts with, and the engine serves it before the first step."""
    done = toy_run(["lora"], steps=1, lr=1e-2, lora_export="adapter", export_hf=tmp_path / "hf", lora_alpha=8)
    assert {f.name for f in (tmp_path / "hf").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = toy_run(["lora"], steps=1, lr=0.0, lora_adapter=tmp_path / "hf", lora_alpha=8, verify_logprobs=True)
    for name, parameter in done.trainer.model.named_parameters():
        assert torch.equal(again.trainer.model.get_parameter(name), parameter), name
    assert again.metrics[-1]["train/lora_delta_norm"] == done.metrics[-1]["train/lora_delta_norm"] > 0
    assert again.metrics[-1]["verify/abs_log_prob"] < 1e-5
    for options, why in (
        ({"lora_alpha": 16}, "its lora_alpha is 8, but this run has --lora-alpha 16"),
        ({"lora_alpha": 8, "lora_rank": 4}, "its r is 8, but this run has --lora-rank 4"),
        ({"lora_alpha": 8, "lora_target_modules": "o_proj"}, "give the adapter's --lora-target-modules"),
    ):
        with pytest.raises(ConfigError, match=why):
            toy_run(["lora"], lora_adapter=tmp_path / "hf", **options)


def test_an_adapter_that_names_another_base_gives_a_warning(tmp_path, caplog):
    options = {"lora_rank": 4, "steps": 1}
    toy_run(["lora"], lora_export="adapter", export_hf=tmp_path / "hf", **options)
    file = tmp_path / "hf" / "adapter_config.json"
    assert "trained over" not in caplog.text
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    toy_run(["lora"], lora_adapter=tmp_path / "hf", **options)
    assert "it was trained over Qwen/Qwen3-8B, and this run's base is " in caplog.text


def test_dropout_is_for_training_passes(merged):
    done = toy_run(["lora"], steps=1, lora_dropout=0.5, lr=1e-2, verify_logprobs=True)
    plain = toy_run(["lora"], steps=1, lr=1e-2)
    assert done.metrics[-1]["verify/abs_log_prob"] < 1e-5
    assert done.metrics[-1]["train/grad_norm"] != plain.metrics[-1]["train/grad_norm"]
