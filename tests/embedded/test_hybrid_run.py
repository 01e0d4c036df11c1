"""Runs of models whose layers keep a state: rollout, training, weight sync, checkpoints, with plugins and schedules."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from miles_embedded.testing.families import family_checkpoint, lacking

pytestmark = pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))


def checkpoint_tensors(directory):
    root = directory / "checkpoints" / "step_00000002"
    return {(p.name, n): t for p in sorted(root.rglob("*.safetensors")) for n, t in load_file(p).items()}


def test_a_run_agrees_with_its_engine_and_continues_as_if_it_had_not_stopped(toy_run, tmp_path):
    options = {
        "hf_checkpoint": family_checkpoint("qwen3_next", tmp_path / "model"),
        "plugins": ["r3"],
        "self_check": True,
        "dtype": "float32",
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = toy_run(directory=whole, steps=2, **options)
    assert len(run.metrics) == 2 and all(record["mismatch/abs_log_prob_max"] < 2e-4 for record in run.metrics)
    toy_run(directory=parts, steps=1, **options)
    toy_run(directory=None, load=parts, save=None, steps=2, **options)
    one, two = checkpoint_tensors(whole), checkpoint_tensors(parts)
    assert one and one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


#: What a run combines with such a model -> its family and options.
COMBINED = {
    "a format and r3": (
        "nemotron_h",
        {
            "plugins": ["int4", "r3"],
            **{
                "rollout_precision": "int4",
                "train_precision": "int4",
                "int4_group_size": 8,
                "recompute_activations": True,
            },
        },
    ),
    "lora": ("jamba", {"plugins": ["lora"], "lora_target_modules": "all-linear,all-experts", "verify_logprobs": True}),
    "a format of experts without a gate": (
        "nemotron_h",
        {
            "plugins": ["nvfp4"],
            **{"rollout_precision": "nvfp4", "train_precision": "nvfp4", "emulate_precision": True},
        },
    ),
    "lora, renamed modules": ("nemotron_h", {"plugins": ["lora"], "verify_logprobs": True}),
    "partial responses": (
        "bamba",
        {
            **{"schedule": "async", "max_weight_staleness": 3, "pause_generation_mode": "retract", "steps": 5},
            "rollout_max_response_len": 40,
            "lr": 1e-12,  # tokens of earlier weights have nearly the same log-probs
        },
    ),
}


@pytest.mark.parametrize("case", COMBINED)
def test_a_run_agrees_with_its_engine(toy_run, tmp_path, case):
    family, options = COMBINED[case]
    checkpoint = family_checkpoint(family, tmp_path / "model")
    run = toy_run(**{"hf_checkpoint": checkpoint, "dtype": "float32", "lr": 1e-2, "steps": 2, **options})
    for record in run.metrics:
        assert record["mismatch/abs_log_prob_max"] < 2e-4 and record["train/grad_norm"] > 0
        assert "r3" not in options.get("plugins", ()) or "r3/routers_differing" in record
    several = [sample for sample in run.samples if len({version for _, version in sample["weight_versions"]}) > 1]
    assert bool(several) == (case == "partial responses")
