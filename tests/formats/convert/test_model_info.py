import json

import pytest
import torch
from safetensors.torch import save_file

from miles_core.errors import CheckpointError
from miles_formats.convert.model_info import inspect_model

LAYER = "model.layers.{}."


def make_model(directory, shards=1):
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 4)}
    for layer in range(2):
        name = LAYER.format(layer)
        tensors[name + "mlp.gate.weight"] = torch.zeros(4, 4)
        tensors[name + "mlp.shared_expert_gate.weight"] = torch.zeros(1, 4)
        tensors |= {
            f"{name}mlp.experts.{e}.gate_proj.weight": torch.zeros(2, 4, dtype=torch.bfloat16) for e in range(4)
        }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_counts_come_from_the_headers(tmp_path, shards):
    info = inspect_model(make_model(tmp_path / "m", shards))
    experts = 2 * 4 * 8
    assert info.parameters == 40 + 2 * (16 + 4) + experts
    assert info.active == info.parameters - experts // 2
    assert info.dtypes == {"F32": 80, "BF16": experts}
    assert (info.routers, info.expert_layers, info.context) == (2, 2, 256)
    assert (info.tokenizer, info.chat_template) == ("", False)
    assert info.training_bytes == {"float32": info.parameters * 16, "bfloat16": info.parameters * 18}


def test_tokenizer_and_chat_template(tmp_path):
    model = make_model(tmp_path / "m")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    info = inspect_model(model)
    assert (info.tokenizer, info.chat_template) == ("tokenizer.json", True)
    (model / "tokenizer_config.json").write_text("{}")
    assert not inspect_model(model).chat_template
    (model / "chat_template.jinja").write_text("x")
    assert inspect_model(model).chat_template


def test_damage_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        inspect_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        inspect_model(tmp_path)
    model = make_model(tmp_path / "m")
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: "):
        inspect_model(model)
    file.write_bytes(whole[:4])
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        inspect_model(model)
    file.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(CheckpointError, match="header is damaged"):
        inspect_model(model)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        inspect_model(model)
    (model / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        inspect_model(model)
    sharded = make_model(tmp_path / "s", shards=3)
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing \(1 of the 3 weight files"):
        inspect_model(sharded)
