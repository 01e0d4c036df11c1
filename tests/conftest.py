"""Checkpoints and an installed number format for tests of conversion."""

import json

import pytest
import torch
from safetensors.torch import save_file

from miles_core.precision import installed
from miles_core.testing.doubles.pair_format import PLUGIN


@pytest.fixture
def pair8(monkeypatch):
    """The double is the only format that is installed."""
    monkeypatch.setattr(installed, "discover", lambda: {PLUGIN.name: PLUGIN})


@pytest.fixture
def checkpoint(tmp_path):
    """Writes ``{file: {name: tensor}}`` as a checkpoint; ``config`` are entries of its config.json."""

    def write(files, name="bf16", **config):
        directory = tmp_path / name
        directory.mkdir()
        for file, tensors in files.items():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        if len(files) > 1:
            home = {n: file for file, tensors in files.items() for n in tensors}
            index = {"metadata": {"total_size": 0}, "weight_map": home}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16", **config}))
        (directory / "tokenizer.json").write_text("{}")
        return directory

    return write


@pytest.fixture
def weight():
    """A random matrix in BF16, different at every call."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


@pytest.fixture
def tensors(weight):
    """A layer of a dense model."""
    return {
        "model.embed_tokens.weight": weight(16, 8),
        "model.layers.0.mlp.gate_proj.weight": weight(12, 8),
        "model.layers.0.mlp.up_proj.weight": weight(12, 8) * 3,
        "model.layers.0.mlp.down_proj.weight": weight(8, 12),
        "model.layers.0.input_layernorm.weight": weight(8),
        "model.layers.0.self_attn.q_proj.weight": weight(8, 8),
        "model.layers.0.self_attn.q_proj.bias": weight(8),
        "lm_head.weight": weight(16, 8),
    }
