"""A run of a model whose layers keep a state: rollout, training, weight sync, checkpoints."""

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
