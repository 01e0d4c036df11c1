"""A converted checkpoint, read by code we did not write."""

import pytest
import torch
import transformers

from miles_core.cli.main import main
from miles_embedded import load_model
from miles_testing import tiny_checkpoint


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_and_compressed_tensors_load_what_miles_convert_wrote(tmp_path, family):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra: test)")
    pytest.importorskip("accelerate")
    source = tiny_checkpoint(
        family, tmp_path / "bf16", dtype="bfloat16", hidden_size=128, intermediate_size=256, head_dim=64
    )
    out = tmp_path / "int4"
    words = ["convert", "--to", "int4", "--int4-group-size", "64", "--model-dir", str(source), "--save-dir", str(out)]
    assert main(words) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.bfloat16,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ours = dict(load_model(out, "bfloat16").named_parameters())
    theirs = dict(loaded.named_parameters())
    for name, parameter in ours.items():
        assert torch.equal(theirs[name], parameter), name
