"""Examining a checkpoint from its headers reports the same problems as loading it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.cli import main as cli
from miles_core.errors import CheckpointError
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.model.load import load_model
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import toy_arguments, toy_files


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def changed(qwen3, tmp_path):
    """``changed(config, weights)``: a copy with other entries in config.json, and what ``weights(tensors)`` makes of its weights."""

    def make(config=None, weights=None):
        model = shutil.copytree(qwen3, tmp_path / "model")
        said = json.loads((model / "config.json").read_text())
        made = {k: v for k, v in {**said, **(config or {})}.items() if v is not ...}
        (model / "config.json").write_text(json.dumps(made))
        if weights is not None:
            tensors = load_file(model / "model.safetensors")
            weights(tensors)
            save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return model

    return make


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        ({"vocab_size": 128}, None, r"weight is \[64, 32\] in its weights and \[128, 32\] by its config.json \(2 such"),
        ({"num_attention_heads": 3}, None, r"o_proj.weight is \[32, 64\] in its weights"),
        ({"num_attention_heads": 0}, None, "no model can be made of its config.json"),
        ({"hidden_act": "zigzag"}, None, "no model can be made of its config.json .*zigzag"),
        ({"text_config": []}, None, "no model can be made of its config.json"),
        ({"model_type": ...}, None, "config.json cannot be used"),
        ({"num_hidden_layers": 3}, None, r"config.json cannot be used .*`num_hidden_layers` \(3\) must be equal"),
        ({"layer_types": ..., "num_hidden_layers": 3}, None, "weights of Qwen3ForCausalLM are missing, first model.layers.2"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, None, "rotary frequencies of .*rope_theta"),
        ({"rope_parameters": {"rope_type": "zigzag", "rope_theta": 1e4}}, None, "no model can be made of its config.json"),
        ({"quantization_config": {"quant_method": "zig"}}, None, "no installed number format recognises"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            None,
            "no tensor is stored so",
        ),
        (None, lambda w: w.pop(Q), f"1 weights of Qwen3ForCausalLM are missing, first {Q}"),
        (None, lambda w: w.update({Q: w[Q][:-1].clone()}), rf"{Q} is \[63, 32\] in its weights and \[64, 32\]"),
    ],
)  # fmt: skip
def test_it_is_refused_without_reading_weights_as_when_it_is_loaded(changed, config, weights, said):
    model = changed(config, weights)
    with pytest.raises(CheckpointError, match=said) as examined:
        examine_checkpoint(model)
    with pytest.raises(CheckpointError) as loaded:
        load_model(model)
    assert str(examined.value) == str(loaded.value) and str(model) in str(loaded.value)


def test_weights_of_another_kind_are_told_by_a_run_and_not_by_a_plan(changed):
    model = changed()
    examine_checkpoint(model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    examine_checkpoint(model, weights=False)
    with pytest.raises(CheckpointError, match="safetensors weights; other formats are not supported"):
        examine_checkpoint(model)


def test_a_weight_that_is_not_finite_is_told_when_it_is_read(changed):
    def spoil(weights):
        weights["model.embed_tokens.weight"][5, 2:4] = torch.tensor([float("inf"), float("nan")])

    model = changed(None, spoil)
    examine_checkpoint(model)
    with pytest.raises(
        CheckpointError,
        match=r"model.embed_tokens.weight holds 2 values that are not finite, the first \(inf\) at \[5, 2\]",
    ):
        load_model(model)


def test_a_buffer_that_is_not_finite_is_named_like_a_weight(tmp_path):
    """The correction bias of DeepSeek-V3's router chooses experts, and is no parameter."""
    model = tiny_checkpoint("deepseek_v3", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (name,) = (n for n in weights if n.endswith("e_score_correction_bias"))
    weights[name][1] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"e_score_correction_bias holds 1 values that are not finite, .* at \[1\]"
    ):
        load_model(model)


def test_dry_run_and_plan_ask_whoever_builds_the_model(tmp_path, capsys):
    model = shutil.copytree(toy_files() / "model", tmp_path / "model")
    words = toy_arguments(directory=tmp_path / "run", hf_checkpoint=model)
    weights = load_file(model / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for command in (["train", *words, "--dry-run"], ["train", *words], ["plan", "--hf-checkpoint", str(model)]):
        assert cli.main(command) == 2
        assert "are missing, first model.norm.weight" in capsys.readouterr().err
    (model / "model.safetensors").unlink()
    assert cli.main(["train", *words, "--dry-run"]) == 2
    assert "has no *.safetensors" in capsys.readouterr().err
    assert cli.main(["plan", "--hf-checkpoint", str(model)]) == 0  # of a config.json alone
    (model / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))  # 671 billion parameters
    assert cli.main(["plan", "--hf-checkpoint", str(model)]) == 0
    other = tmp_path / "other.py"
    other.write_text(
        "from miles_core.plugin import Plugin\n"
        'plugin = Plugin("other", "a model of its own", "0", "~=0.1", provides={"model": {"other": "make"}})\n'
    )
    assert cli.main(["train", *words, "--dry-run", "--plugins", str(other)]) == 0


VL = {"text_config": {"model_type": "qwen2_vl_text", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64,
                      "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]}},
      "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v2", "n_routed_experts": 4, "num_experts_per_tok": None, "topk_method": "greedy"},
         r"TypeError: topk\(\).*NoneType; in \w+, modeling_deepseek_v2.py:\d+"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 6}, "k not in range"),
        ({"model_type": "qwen2_vl", **VL}, "split_with_sizes.*modeling_qwen2_vl"),
    ],
    ids=["deepseek_v2", "qwen3_moe", "qwen2_vl"],
)  # fmt: skip
def test_a_forward_that_would_fail_is_refused_without_data(tmp_path, config, reason):
    """These models can be built; only their forward reads the wrong entry."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "first_k_dense_replace": 1, **config}))
    with pytest.raises(CheckpointError, match=f"the forward of .* fails .*({reason}).*an entry of config.json"):
        examine_checkpoint(tmp_path, weights=False)


def test_a_forward_that_reads_values_is_not_judged(tmp_path):
    """JetMoE's experts sort the choices on the host, which nothing on the meta device can."""
    tiny_checkpoint("qwen3", tmp_path)  # a tokenizer, and a config.json to replace
    config = {"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_channels": 8,
              "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    examine_checkpoint(tmp_path, weights=False)
