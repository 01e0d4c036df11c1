"""One copy of a frozen base for engine and trainer gives the numbers of separate plain ones, and is read without its plain weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.plugin import MilesError
from miles_embedded import codes_of, load_model, read_weights
from miles_formats import FormatCodec
from miles_formats.convert.conversion import run as convert
from miles_formats.convert.encode import to_format
from miles_int4.format import Int4
from miles_lora import base
from miles_testing import plan, tiny_checkpoint, toy_run

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
INT4 = {"train_precision": "int4", "rollout_precision": "int4", "int4_group_size": 32, "emulate_precision": True}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A small mixture of experts whose checkpoint has INT4 codes."""
    plain = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("plain") / "model", dtype="bfloat16", **SIZES)
    found = tmp_path_factory.mktemp("stored") / "model"
    convert(to_format(CheckpointFiles(plain), FormatCodec(Int4(32))), found)
    return found


@pytest.mark.parametrize(("dtype", "targets"), [("float32", "all-linear,all-experts"), ("bfloat16", "all-linear")])
def test_a_shared_encoded_base_trains_bit_for_bit_as_separate_plain_ones(stored, tmp_path, monkeypatch, dtype, targets):
    results = []
    for plugins, precision in ((["lora", "int4"], INT4), (["lora"], {"lora_sync": "adapter"})):
        if plugins == ["lora"]:
            monkeypatch.setattr(base, "shares", lambda run: False)
        out = tmp_path / plugins[-1]
        options = {"hf_checkpoint": stored, "dtype": dtype, "lora_target_modules": targets, "lora_rank": 4, **precision}
        done = toy_run(plugins, steps=2, lr=1e-2, verify_logprobs=True, export_hf=out, **options)
        models = done.trainer.model, done.engine.model
        shared = [
            models[0].get_parameter(n).data_ptr() == p.data_ptr()
            for n, p in models[1].named_parameters()
            if "lora" not in n
        ]
        codes = [(codes_of(p), codes_of(models[1].get_parameter(n))) for n, p in models[0].named_parameters()]
        assert all(a is b for a, b in codes) and any(a for a, _ in codes) == (len(plugins) == 2)
        assert all(shared) or len(plugins) == 1
        names = (
            "train/loss",
            "train/grad_norm",
            "train/lora_delta_norm",
            "verify/abs_log_prob",
            "mismatch/abs_log_prob",
        )
        results.append(([[m[n] for n in names] for m in done.metrics], load_file(out / "model.safetensors")))
    (ours, mine), (theirs, its) = results
    assert ours == theirs and all(m[1] > 0 for m in ours)
    assert mine.keys() == its.keys() and all(torch.equal(t, its[n]) for n, t in mine.items())


def test_stored_codes_are_read_as_they_are(stored, monkeypatch):
    """The codes of the checkpoint are those in memory, and no whole model is made of plain weights."""
    files = CheckpointFiles(stored)
    monkeypatch.setattr("miles_embedded.model.load.fill_model", None)
    model = load_model(stored, fill=lambda model, files: read_weights(model, files, FormatCodec(Int4(32))))
    codes = codes_of(model.get_parameter("model.layers.1.mlp.experts.gate_up_proj"))
    (stack,) = codes.stacks
    for i, name in enumerate(
        f"model.layers.1.mlp.experts.{e}.{half}_proj" for e in range(2) for half in ("gate", "up")
    ):
        for suffix, tensor in stack.parts.items():
            assert torch.equal(tensor[i], files.read(f"{name}.{suffix}"))
    assert torch.equal(model.get_input_embeddings().weight, files.read("model.embed_tokens.weight"))


def test_a_plain_checkpoint_is_encoded_parameter_by_parameter(stored, tmp_path, monkeypatch):
    """Codes made while reading are those of a conversion."""
    plain = tiny_checkpoint("qwen3_moe", tmp_path / "model", dtype="bfloat16", **SIZES)
    monkeypatch.setattr("miles_embedded.model.load.fill_model", None)
    models = [
        load_model(path, "bfloat16", fill=lambda model, files: read_weights(model, files, FormatCodec(Int4(32))))
        for path in (plain, stored)
    ]
    for name, parameter in models[0].named_parameters():
        other = models[1].get_parameter(name)
        if (codes := codes_of(parameter)) is None:
            assert torch.equal(parameter, other)
        else:
            assert all(torch.equal(a, b) for a, b in zip(codes.tensors(), codes_of(other).tensors(), strict=True))
    assert all(torch.equal(b, models[1].get_buffer(n)) for n, b in models[0].named_buffers())


def test_experts_on_several_devices_train_as_on_one(stored, tmp_path):
    """The number of devices changes no bit; codes of a layer are on as many devices, in one copy for engine and trainer."""
    results = []
    for count in (1, 2, 4):
        out = tmp_path / str(count)
        options = {"hf_checkpoint": stored, "lora_target_modules": "all-linear", "lora_base_gpus": count, **INT4}
        done = toy_run(["lora", "int4"], steps=2, lr=1e-2, verify_logprobs=True, export_hf=out, **options)
        trainer, engine = done.trainer.model, done.engine.model
        name = "model.layers.1.mlp.experts.down_proj"
        codes = codes_of(trainer.get_parameter(name))
        assert codes is codes_of(engine.get_parameter(name)) and len(getattr(codes, "parts", "1")) == count
        names = ("train/loss", "train/grad_norm", "train/lora_delta_norm", "verify/abs_log_prob")
        assert all(m["verify/abs_log_prob"] < 1e-5 for m in done.metrics)
        results.append(([[m[n] for n in names] for m in done.metrics], load_file(out / "model.safetensors")))
    (whole, its), (two, mine), (four, other) = results
    assert two == four and all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    assert [m[1] for m in two] == pytest.approx([m[1] for m in whole], rel=1e-4)
    assert all(torch.allclose(tensor, its[name], atol=1e-3) for name, tensor in mine.items())


def test_devices_of_experts_need_experts_codes_and_one_process():
    for options, why in (
        ({"plugins": ["lora"], "lora_sync": "adapter"}, "other formats also round the inputs"),
        ({"plugins": ["lora", "int4"], **INT4, "family": "llama"}, "only experts are divided"),
        ({"plugins": ["lora", "int4"], **INT4, "colocate": True}, "neither can release them"),
    ):
        with pytest.raises(MilesError, match=why):
            plan(**{"lora_base_gpus": 2, **options})
    with pytest.raises(MilesError, match="divided as codes without adapters"):
        toy_run(["lora", "int4"], lora_base_gpus=2, lora_target_modules="all-experts", sizes=SIZES, **INT4)
