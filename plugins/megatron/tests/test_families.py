"""The tables of weights against what Transformers writes: names, counts, and every byte through both ways."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from miles_core.plugin import CheckpointError
from miles_megatron import count, families
from miles_megatron.families.parts import transformer_engine_name
from miles_megatron.layout import join, shard
from miles_megatron.shapes import shapes

#: Buffers that are in a checkpoint and are no parameters.
BUFFER = "e_score_correction_bias"


@pytest.fixture
def stored(checkpoints, family):
    return load_file(checkpoints(family) / "model.safetensors")


@pytest.fixture
def architecture(config_of, family):
    return replace(families.read(config_of(family)), mtp=0)  # Transformers writes no MTP layers


def test_every_tensor_of_a_checkpoint_is_in_the_table_once(stored, architecture):
    named = [name for entry in families.weights(architecture) for name in entry.checkpoint]
    stacked = [n for n in named if ".experts." in n and n.count("proj") and "experts.0" not in n]
    assert set(named) == set(stored)
    assert len(named) == len(set(named)) or (architecture.family == "gpt_oss" and stacked)


def test_its_shapes_follow_from_config_json(stored, architecture):
    known = {
        name: shape for entry in families.weights(architecture) for name, shape in shapes(entry, architecture).items()
    }
    assert known == {name: tuple(tensor.shape) for name, tensor in stored.items()}


def test_parameters_are_counted(stored, architecture):
    parameters = sum(t.numel() for name, t in stored.items() if BUFFER not in name)
    assert count.model(architecture).total == parameters


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bytes_come_back(stored, architecture, ranks):
    torch.manual_seed(0)
    found = {}
    for entry in families.weights(architecture):
        given = [torch.randn_like(stored[n]) if n not in found else found[n][0] for n in entry.checkpoint]
        parts = [shard(entry, given, architecture, rank, ranks) for rank in range(ranks)]
        assert all(p.shape == parts[0].shape for p in parts)
        back = join(entry, parts if entry.axis is not None else parts[:1], architecture)
        for name, one, other in zip(entry.checkpoint, given, back, strict=True):
            expected = one[entry.expert] if entry.layout.startswith("stacked") else one
            assert torch.equal(expected, other), (entry.name, name)
            found[name] = (one,)


def test_every_name_of_transformer_engine_is_one_tensor_s(architecture):
    entries = list(families.weights(architecture))
    assert len({transformer_engine_name(e, architecture) for e in entries}) == len(entries)


def test_queries_keys_and_values_are_interleaved_by_group(config_of):
    a = families.read(config_of("qwen3"))
    entry = next(e for e in families.weights(a) if e.layout == "qkv")
    sizes = (a.q_size, a.kv_size, a.kv_size)
    parts = [torch.arange(n).unsqueeze(1) + 1000 * i for i, n in enumerate(sizes)]
    rows = shard(entry, parts, a).flatten().tolist()
    per = a.heads // a.kv_heads * a.head_dim
    assert rows[:per] == list(range(per))
    assert rows[per : per + a.head_dim] == list(range(1000, 1000 + a.head_dim))
    assert rows[per + a.head_dim : per + 2 * a.head_dim] == list(range(2000, 2000 + a.head_dim))
    assert rows[per + 2 * a.head_dim] == per


def test_a_vocabulary_that_does_not_divide_is_padded(config_of):
    a = replace(families.read(config_of("qwen3")), vocab=5)
    entry = next(e for e in families.weights(a) if e.layout == "vocabulary")
    table = torch.arange(10.0).view(5, 2)
    parts = [shard(entry, [table], a, rank, 4) for rank in range(4)]
    assert [len(p) for p in parts] == [2] * 4 and not parts[3].any()
    assert torch.equal(join(entry, parts, a)[0], table)


def test_an_mtp_layer_is_the_layer_after_the_last(config_of):
    a = families.read(config_of("deepseek_v3"))
    assert a.mtp == 1
    names = [n for e in families.weights(a) if e.name.startswith("mtp.") for n in e.checkpoint]
    assert {f"model.layers.2.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= set(names)
    assert "model.layers.2.self_attn.q_a_proj.weight" in names
    assert "model.layers.2.mlp.experts.0.gate_proj.weight" in names


def test_a_family_without_a_table_is_refused_with_those_there_are():
    for other in ("phi3", "starcoder2", "llava"):
        with pytest.raises(
            CheckpointError,
            match=rf"no table of weights for model_type {other} .* qwen3_moe.* Use --trainer embedded, or add a table",
        ):
            families.read({"model_type": other})


@pytest.mark.parametrize("lacking", families.LACKING)
def test_a_family_that_megatron_core_cannot_build_is_refused_with_what_is_missing(lacking):
    with pytest.raises(
        CheckpointError, match=rf"does not support model_type {lacking} .*it lacks .*; use --trainer embedded"
    ):
        families.read({"model_type": lacking})
