"""Checkpoints in this format, read by code we did not write."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from miles_core.cli.main import main
from miles_embedded import load_model
from miles_embedded.model.views import Loader, export
from miles_formats import FormatCodec
from miles_fp8.format import Fp8
from miles_testing import tiny_checkpoint


@pytest.mark.parametrize("power_of_two", [False, True])
def test_transformers_loads_the_checkpoint_and_dequantises_to_the_same_values(tmp_path, power_of_two):
    pytest.importorskip("accelerate")  # Transformers wants it for quantised checkpoints
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    tiny_checkpoint("qwen3_moe", tmp_path, **sizes)
    model = load_model(tmp_path, "bfloat16")
    codec = FormatCodec(Fp8(power_of_two))
    stored, kept, values = {}, [], {}
    for encoded in codec.encode(export(model)):
        stored |= {name: tensor.contiguous() for name, tensor in encoded.parts.items()}
        values[encoded.name] = codec.decode(encoded)
        if not encoded.format and encoded.parts[encoded.name].ndim == 2:
            kept.append(encoded.name.removesuffix(".weight"))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": codec.format.config(kept), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    assert not any(info.values())
    loader = Loader(model)
    for name, tensor in values.items():
        loader.put(name, tensor)
    theirs = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(theirs[name], parameter), name


def test_transformers_loads_what_miles_convert_wrote(tmp_path):
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    source, out = tiny_checkpoint("qwen3_moe", tmp_path / "bf16", dtype="bfloat16", **sizes), tmp_path / "fp8"
    assert main(["convert", "--to", "fp8", "--model-dir", str(source), "--save-dir", str(out)]) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    assert not any(info.values())
    ours = dict(load_model(out, "bfloat16").named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, ours[name]), name
