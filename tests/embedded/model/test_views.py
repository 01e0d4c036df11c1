"""Units are what ``save_pretrained`` writes, bit for bit, in both directions."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core.errors import CheckpointError
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_embedded.model.views import Loader, export, views
from miles_testing.tiny import FAMILIES, tiny_checkpoint

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MORE = {
    "mixtral": transformers.MixtralConfig(**SMALL, intermediate_size=8, num_local_experts=4),
    "qwen3_tied": transformers.Qwen3Config(**SMALL, head_dim=8, intermediate_size=8, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=[*FAMILIES, *MORE])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("layout") / request.param
    if request.param in FAMILIES:
        return tiny_checkpoint(request.param, directory)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MORE[request.param]).save_pretrained(directory)
    return directory


def exported(model):
    return {n: t for unit in export(model) for n, t in unit.tensors.items()}


def test_export_is_what_transformers_saves(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():  # not only what was loaded, but what the model holds now
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    stored, found = load_file(tmp_path / "model.safetensors"), exported(model)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def test_loading_is_the_inverse(checkpoint):
    stored = load_file(checkpoint / "model.safetensors")
    model, reference = (AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    loader = Loader(model)
    assert sorted(loader.missing()) == sorted(stored)
    for name in reversed(stored):
        loader.put(name, stored[name])
    assert loader.missing() == []
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_views_are_derived_without_copying_weights(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    memory = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert all(t.untyped_storage().data_ptr() in memory for t in exported(model).values())
    assert views(model) is views(model)


def test_gate_and_up_travel_together(tmp_path):
    for family in ("qwen3_moe", "deepseek_v3"):
        units = [list(u.tensors) for u in export(load_model(tiny_checkpoint(family, tmp_path / family)))]
        pairs = [names for names in units if len(names) == 2]
        assert all(a.replace("gate_proj", "up_proj") == b for a, b in pairs)
        assert sum("gate_proj" in n for names in units for n in names) == len(pairs) > 0
        assert all(len(names) == 1 for names in units if names not in pairs)


def test_joined_experts_arrive_matrix_by_matrix_too(tmp_path):
    model = load_model(tiny_checkpoint("gpt_oss", tmp_path / "gpt_oss"))
    loader, experts = Loader(model), "model.layers.0.mlp.experts"
    plain = model.get_parameter(f"{experts}.gate_up_proj").detach().clone()
    up = torch.randn(plain[1].T[1::2].shape)  # gate and up take turns
    loader.put(f"{experts}.1.up_proj.weight", up)
    missing = loader.missing()
    assert f"{experts}.gate_up_proj" not in missing and f"{experts}.down_proj" in missing
    assert f"{experts}.1.gate_proj.weight" in missing and f"{experts}.1.up_proj.weight" not in missing
    expected = plain.clone()
    expected[1].T[1::2] = up
    assert torch.equal(model.get_parameter(f"{experts}.gate_up_proj"), expected)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight has shape \[2, 2\]"):
        loader.put(f"{experts}.0.up_proj.weight", torch.zeros(2, 2))
    with pytest.raises(CheckpointError, match="no tensor"):
        loader.put(f"{experts}.99.up_proj.weight", up)


def test_wrong_tensors_are_refused(tmp_path):
    model = load_model(tiny_checkpoint("llama", tmp_path / "llama"))
    loader = Loader(model)
    with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
        loader.put("model.nothing", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"has shape \[1\]"):
        loader.put("model.norm.weight", torch.zeros(1))
    loader.put("lm_head.weight", torch.ones(64, 32))  # tied: the embeddings under their other name
    assert "model.embed_tokens.weight" not in loader.missing()
    assert model.get_input_embeddings().weight.min() == 1


def test_an_export_loads_like_the_original_in_shards_too(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    export_checkpoint(model, None, tmp_path / "export", shard_bytes=4000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in load_file(checkpoint / "model.safetensors").values()
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    model = load_model(tiny_checkpoint("llama", tmp_path / "llama"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("miles_embedded.model.export.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_checkpoint(model, None, tmp_path / "out" / "export")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_export_never_overwrites_and_fills_what_is_there(tmp_path):
    model = load_model(tiny_checkpoint("llama", tmp_path / "llama"))
    (tmp_path / "mounted" / "lost+found").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "mounted")
    export_checkpoint(model, None, tmp_path / "link")
    found = {p.name for p in (tmp_path / "mounted").iterdir()}
    assert {"config.json", "model.safetensors"} < found and not {n for n in found if n.startswith(".")}
    assert json.loads((tmp_path / "mounted" / "config.json").read_text()).get(
        "use_cache", True
    )  # for whoever generates
    with pytest.raises(CheckpointError, match="not empty"):
        export_checkpoint(model, None, tmp_path / "llama")


def test_experts_are_sliced_in_one_call_per_parameter(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path, num_experts=32))
    views(model)
    with torch.profiler.profile() as profiler:
        found = exported(model)
    assert len(found) > 192
    sliced = [event for event in profiler.events() if event.name == "aten::as_strided"]
    by_name = {view.name: view for view in views(model)}
    state = model.state_dict()
    for name, tensor in found.items():
        expected = by_name[name].of(state[by_name[name].source])
        assert tensor.data_ptr() == expected.data_ptr() and tensor.stride() == expected.stride()
        assert tensor.shape == expected.shape
    calls = [event for event in sliced if event.cpu_parent is None]
    assert len(calls) < 60
