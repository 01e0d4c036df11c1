"""Plans of models with gated delta nets: what is refused and why, optional kernels, counts, and checks of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.plugin import CheckpointError, PlanError
from miles_embedded.testing.families import lacking
from miles_megatron import count, families
from miles_megatron.architecture import Kind
from miles_megatron.examine import examine_checkpoint
from miles_megatron.families import HYBRID
from miles_megatron.memory import Work, memory
from miles_megatron.recipes import cuts
from miles_megatron.sizes import Sizes, misfits
from miles_testing import plan

#: The plan of a run includes the embedded engine.
planned = pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_layers_without_a_list_attend_at_an_interval():
    config = {**PUBLISHED["QWEN3_NEXT_80B"], "layer_types": None}
    a = families.read(config)
    assert a.mixers == ("delta", "delta", "delta", "attention") * 12 and a.rotary.share == 0.25
    every = families.read({**config, "full_attention_interval": 2})
    assert every.mixers == ("delta", "attention") * 24


def test_other_kinds_of_layers_are_refused(config_of):
    with pytest.raises(CheckpointError, match=r"layer_types of config.json has chunked_attention"):
        families.read({**config_of("qwen3_next"), "layer_types": ["chunked_attention", "full_attention"]})
    with pytest.raises(CheckpointError, match="lists 1 layer_types, and num_hidden_layers is 2"):
        families.read({**config_of("qwen3_next"), "layer_types": ["full_attention"]})
    with pytest.raises(CheckpointError, match="attn_output_gate is False"):
        families.read({**config_of("qwen3_5_text"), "attn_output_gate": False})


def test_heads_of_keys_divide_by_tensor_and_context_parallel_ranks(config_of):
    a = families.read(config_of("qwen3_5_text"))  # 2 heads of keys
    assert not list(misfits(Sizes(2, cp=2), a))
    [found] = misfits(Sizes(4, tp=2, etp=2, cp=2, sequence=True), a)
    assert "2 heads of keys of a gated delta net that divide by tensor x context = 4" in found.needs
    [alone] = misfits(Sizes(2, tp=2, etp=2), a)
    assert alone.needs == "--sequence-parallel" and alone.others == ({"sequence_parallel": True},)


def test_stages_have_the_parameters_of_their_layers():
    a = families.read(PUBLISHED["QWEN3_NEXT_80B"])
    work = Work(tokens=1024, micro_batches=1)
    stages = memory(a, Sizes(48, pp=48), work)
    delta, attention = (count.layer(a, Kind(mixer, True)).total for mixer in ("delta", "attention"))
    assert delta != attention
    for stage in stages[1:-1]:
        assert stage.weights == 2 * (attention if stage.number % 4 == 3 else delta)
    [whole] = memory(a, Sizes(), work)
    assert whole.weights == 2 * count.model(a).total


def test_tiles_of_rows_do_not_fit_into_joined_projections():
    a = families.read(PUBLISHED["QWEN3_NEXT_80B"])
    assert list(cuts(a, Sizes(), (128, 128))) == ["gated delta nets with a multiple of 128 heads on a rank, not 32"]
    assert not list(cuts(a, Sizes(), (1, 128)))


@planned
def test_what_megatron_core_does_not_compute_is_refused_in_the_plan(checkpoints, changed):
    given = {"trainer": "megatron", "hf_checkpoint": checkpoints("qwen3_next")}
    given["facts"] = ["package.megatron-core=0.19.2"]
    with pytest.raises(PlanError, match="gated delta nets compute packed samples only without it"):
        plan(deterministic_mode=True, **given)
    given["hf_checkpoint"] = changed("qwen3_next", mtp_num_hidden_layers=1)
    assert any("1 MTP layers are not trained" in text for text in plan(**given).reviews)
    with pytest.raises(PlanError, match="stores its MTP layers outside of the decoder"):
        plan(["speculative"], enable_mtp_training=True, **given)


@planned
@pytest.mark.parametrize("hybrid", HYBRID)
def test_a_gpu_without_the_kernels_gets_a_note(checkpoints, hybrid):
    given = {"trainer": "megatron", "hf_checkpoint": checkpoints(hybrid)}
    packages = ["package.megatron-core=0.19.2", "package.transformer-engine=2.20.2"]
    facts = ["gpu.sm=90", "gpu.count=1", "gpu.memory_gb=80", *packages]
    note = "without flash-linear-attention ~=0.4.0 torch computes gated delta nets"
    for version in ("none", "0.4.1"):
        found = plan(facts=[*facts, f"package.flash-linear-attention={version}"], **given).advice
        assert any(note in text for text in found) == (version == "none")
    with pytest.raises(PlanError, match=r"needs flash-linear-attention ~=0.4.0"):
        plan(facts=[*facts, "package.flash-linear-attention=0.3.0"], **given)


def test_mtp_layers_are_accepted_and_other_tensors_are_not(checkpoints, tmp_path):
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_bytes((checkpoints("qwen3_next") / "config.json").read_bytes())
    stored = load_file(checkpoints("qwen3_next") / "model.safetensors")
    save_file(stored | {"mtp.fc.weight": torch.zeros(2, 2)}, file)
    examine_checkpoint(tmp_path)
    save_file(stored | {"visual.fc.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(CheckpointError, match=r"1 weights are not in the table of qwen3_next, the first is visual"):
        examine_checkpoint(tmp_path)


def test_a_gate_doubles_the_queries_of_attention(config_of):
    a = families.read(config_of("qwen3_5_text"))
    gated, plain = count.attention(a).total, count.attention(replace(a, output_gate=False)).total
    assert gated - plain == a.q_size * a.hidden
