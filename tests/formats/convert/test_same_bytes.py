"""One format, four places: converter, weight sync, trainer and engine hold the same bytes, for every installed format."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.cli import main as cli
from miles_core.config.load import load
from miles_core.errors import CheckpointError
from miles_embedded.model.load import load_model
from miles_embedded.model.views import export, views
from miles_embedded.quantized.weights import install
from miles_formats.convert.installed import format_class, providers
from miles_formats.options import codec_for
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import toy_files, toy_run

SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 32}
FAMILIES = ("qwen3_moe", "qwen3", "llama", "deepseek_v32")
FORMATS = sorted(providers())


def bf16_checkpoint(family, directory, dtype="bfloat16"):
    """A tiny model with weights of very different sizes, stored in ``dtype``."""
    tiny_checkpoint(family, directory, dtype=dtype, **SIZES, **(LATENT if family == "deepseek_v32" else {}))
    path = directory / "model.safetensors"
    stored = load_file(path)
    for i, (name, tensor) in enumerate(stored.items()):
        scale = torch.logspace(-3, 3, tensor.shape[0])[:, None] if tensor.ndim > 1 else 1.0
        stored[name] = (tensor.float() * scale * (1 + i % 5)).to(tensor.dtype)
    save_file(stored, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bfloat16") for family in FAMILIES), ("qwen3_moe", "float32")]
)
@pytest.mark.parametrize("name", FORMATS)
def test_converter_sync_trainer_and_engine_hold_the_same_bytes(tmp_path, name, family, dtype, capsys):
    source, out = bf16_checkpoint(family, tmp_path / "source", dtype), tmp_path / "out"
    words = ["convert", "--to", name, "--model-dir", str(source), "--save-dir", str(out), "--shard-size", "300KB"]
    code = cli.main(words)
    if code == 2 and "nothing to quantise" in capsys.readouterr().err:
        pytest.skip(f"{name} is not for dense models")
    assert code == 0
    converted = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    model = load_model(source, dtype)
    codec = codec_for(format_class(name), load(["--rollout-precision", name]))

    synced, values = {}, {}
    for encoded in codec.encode(export(model)):
        synced |= {n: t.contiguous() for n, t in encoded.parts.items()}
        values[encoded.name] = codec.decode(encoded)
    assert set(converted) == set(synced)
    for n, tensor in synced.items():
        assert converted[n].dtype == tensor.dtype and converted[n].shape == tensor.shape, n
        assert torch.equal(raw(converted[n]), raw(tensor)), n

    quantizer = install(model, codec)
    engine = load_model(out, "float32")
    theirs = engine.state_dict()
    for view in views(model):
        expected = values[view.name]
        assert torch.equal(view.of(theirs[view.source].detach()), expected.float()), view.name
        if view.source in quantizer.sources:
            assert torch.equal(view.of(quantizer.value(view.source)), expected.to(model.dtype)), view.name


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_by_command_and_by_the_engine_are_the_same_model(tmp_path, name):
    source, out, back = bf16_checkpoint("qwen3_moe", tmp_path / "bf16"), tmp_path / "out", tmp_path / "back"
    assert cli.main(["convert", "--to", name, "--model-dir", str(source), "--save-dir", str(out)]) == 0
    assert cli.main(["convert", "--to", "bf16", "--model-dir", str(out), "--save-dir", str(back)]) == 0
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    direct, plain = load_model(out, "auto"), load_model(back, "auto")
    assert direct.dtype == plain.dtype == torch.bfloat16
    for (n, a), (_, b) in zip(direct.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), n
    assert direct.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.skipif(not FORMATS, reason="no number format is installed")
def test_loading_a_quantised_checkpoint_says_so(tmp_path, caplog):
    source, out = bf16_checkpoint("qwen3_moe", tmp_path / "bf16"), tmp_path / "out"
    assert cli.main(["convert", "--to", FORMATS[0], "--model-dir", str(source), "--save-dir", str(out)]) == 0
    with caplog.at_level(logging.WARNING):
        load_model(out, "float32")
    assert f"is quantised ({FORMATS[0]})" in caplog.text and "--ref-load" in caplog.text
    caplog.clear()
    load_model(source, "float32")
    assert not caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_starts_from_a_quantised_checkpoint(tmp_path, name):
    files = toy_files(**SIZES)
    words = ["convert", "--to", name, "--model-dir", str(files / "model"), "--save-dir", str(tmp_path / "quantised")]
    assert cli.main(words) == 0
    run = toy_run(steps=1, sizes=SIZES, hf_checkpoint=tmp_path / "quantised")
    assert run.metrics[-1]["train/grad_norm"] > 0


def test_a_checkpoint_nobody_recognises_is_refused_by_name(tmp_path):
    source = bf16_checkpoint("llama", tmp_path / "bf16")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "abc9"}}))
    with pytest.raises(CheckpointError, match="quant_method 'abc9'"):
        load_model(source)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)
