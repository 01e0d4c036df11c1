"""The base under the adapters: stored in a number format, shared by policies."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from miles_embedded import EncodedParameter, codes_of
from miles_testing import toy_run

EVERY = "all-linear,all-experts"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
FORMATS = {"fp8": {}, "int4": {"int4_group_size": 32}, "nvfp4": {}}


@pytest.mark.parametrize("name", FORMATS)
def test_an_encoded_base_is_the_same_on_both_sides(name, tmp_path):
    """Engine and trainer read the same codes, though the adapters move; nothing else of the base is in memory."""
    precision = {"train_precision": name, "rollout_precision": name, "emulate_precision": True, **FORMATS[name]}
    options = {
        "sizes": SIZES,
        "lora_target_modules": EVERY,
        "lora_sync": "adapter",
        "verify_logprobs": True,
        **precision,
    }
    done = toy_run(["lora", name], steps=2, lr=1e-2, kl_loss_coef=0.1, export_hf=tmp_path / "hf", **options)
    assert (
        all(record["verify/abs_log_prob"] < 1e-5 for record in done.metrics) and done.metrics[-1]["verify/moved"] > 0.99
    )
    assert done.metrics[-1]["train/lora_delta_norm"] > 0.1
    models = done.trainer.model, done.engine.model, done.trainer.reference
    encoded = {n: p for n, p in models[0].named_parameters() if codes_of(p) is not None}
    assert {n.rpartition(".")[2] for n in encoded} == (
        {"gate_up_proj", "down_proj"} | (set() if name == "nvfp4" else {"weight"})
    )
    for parameter_name, parameter in encoded.items():
        assert parameter.untyped_storage().nbytes() == 0
        codes = codes_of(parameter)
        assert isinstance(codes, EncodedParameter) and all(
            codes_of(m.get_parameter(parameter_name)) is codes for m in models
        )
        assert sum(t.nbytes for t in codes.tensors()) < parameter.numel() * 2
    # the merged export has the decoded base plus adapters
    exported, q_proj = load_file(tmp_path / "hf" / "model.safetensors"), "model.layers.0.self_attn.q_proj."
    layer = models[0].get_submodule(q_proj[:-1])
    values = codes_of(layer.weight).values() if q_proj + "weight" in encoded else layer.weight
    torch.testing.assert_close(
        exported[q_proj + "weight"], values + 2 * (layer.lora.lora_B @ layer.lora.lora_A), rtol=0, atol=1e-6
    )


def test_a_quantised_rollout_takes_either_kind_of_sync():
    options = {"sizes": SIZES, "rollout_precision": "fp8", "emulate_precision": True}
    gaps = []
    for sync in ("merged", "adapter"):
        done = toy_run(["lora", "fp8"], steps=1, lr=1e-2, lora_sync=sync, **options)
        gaps.append(done.metrics[-1]["mismatch/abs_log_prob"])
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-3) and gaps[0] > 1e-3  # B is 0 in the first step


TWO = """
from miles_core.plugin import hookimpl

@hookimpl
def on_sample(run, sample):
    sample.policy = ["solver", "judge"][sample.group_index % 2]
"""


def test_policies_share_one_base(tmp_path):
    """Two trained policies and a frozen one: one base in memory, adapters of their own, each engine with its policy's adapter."""
    (tmp_path / "turns.py").write_text(TWO)
    (tmp_path / "two.yaml").write_text(
        "policies: {solver: {lora: {rank: 4}}, judge: {}, teacher: {role: frozen, generates: true}}"
    )
    options = {
        "config": tmp_path / "two.yaml",
        "lora_sync": "adapter",
        "verify_logprobs": True,
        "lora_export": "adapter",
        "export_hf": tmp_path / "hf",
    }
    done = toy_run(["lora", str(tmp_path / "turns.py")], steps=2, lr=1e-2, **options)
    record = done.metrics[-1]
    assert all(record[f"{p}/train/lora_delta_norm"] > 0 for p in ("solver", "judge"))
    assert all(record[f"{p}/verify/abs_log_prob"] < 1e-5 for p in ("solver", "judge")), record
    models = [m for part in done.parts for m in (part.engine.model, part.learner.rank.trainer.model)]
    memory = {p.data_ptr(): p.nbytes for m in models for p in m.parameters()}
    base = sum(p.nbytes for n, p in models[-1].named_parameters())
    assert sum(memory.values()) < 1.3 * base and len(models) == 6
    ranks = [
        part.learner.rank.trainer.model.get_parameter("model.layers.0.self_attn.q_proj.lora.lora_A").shape[0]
        for part in done.parts[:2]
    ]
    assert ranks == [4, 8]
    assert all((tmp_path / "hf" / p / "adapter_model.safetensors").is_file() for p in ("solver", "judge"))
