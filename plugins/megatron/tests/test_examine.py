"""Checkpoints that the trainer cannot load are refused from their headers."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.cli import main as cli
from miles_core.plugin import CheckpointError
from miles_megatron.examine import examine_checkpoint
from miles_testing import toy_files

K = "model.layers.0.self_attn.k_proj.weight"
BIAS = "model.layers.1.self_attn.o_proj.bias"


def test_a_checkpoint_of_every_family_is_accepted(checkpoints, family):
    examine_checkpoint(checkpoints(family))


def test_what_needs_no_place_is_left_alone(changed):
    def more(weights):
        weights |= {
            "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
            "model.rotary_emb.inv_freq": torch.ones(2),
        }
        weights |= {"model.layers.2.enorm.weight": torch.ones(2)}  # of an MTP layer

    examine_checkpoint(changed("llama", more))


@pytest.mark.parametrize(
    ("weights", "config", "said"),
    [
        (lambda w: w.pop(K), {}, rf"1 weights of a llama model are missing, the first is {K}; is the checkpoint complete"),
        (lambda w: w.update({K: w[K][:-1].clone()}), {}, rf"{K} has shape \[15, 32\], but config.json implies \[16, 32\]"),
        (lambda w: w.update({BIAS: torch.ones(32)}), {}, rf"1 weights are not in the table of llama, the first is {BIAS}: they would be"),
        (lambda w: None, {"quantization_config": {"quant_method": "fp8"}}, "is quantised, but --trainer megatron reads only BF16"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_refused(changed, weights, config, said):
    with pytest.raises(CheckpointError, match=said):
        examine_checkpoint(changed("llama", weights, **config))


def test_plan_asks_it_where_it_trains(tmp_path, capsys):
    model = shutil.copytree(toy_files() / "model", tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    stored["model.extra.weight"] = torch.ones(2)  # the embedded backend lets it be
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    plan = ["plan", "--hf-checkpoint", str(model)]
    assert cli.main(plan) == 0
    assert cli.main([*plan, "--trainer", "megatron", "--fact", "megatron.ranks=1"]) == 2
    assert "1 weights are not in the table of qwen3_moe, the first is model.extra.weight" in capsys.readouterr().err
