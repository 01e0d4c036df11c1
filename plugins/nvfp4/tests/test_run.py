"""nvfp4 in the loop: the toy run."""

import pytest
import torch

NVFP4 = {"plugins": ["nvfp4"], "rollout_precision": "nvfp4", "train_precision": "nvfp4", "emulate_precision": True}


def gap(metrics):
    return sum(step["mismatch/abs_log_prob"] for step in metrics) / len(metrics)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_engine_and_trainer_agree(toy_run, four_over_six):
    assert gap(toy_run(**NVFP4, fp4_four_over_six=four_over_six).metrics) < 1e-5


def test_experts_are_quantised_and_nothing_else(toy_run):
    run = toy_run(**NVFP4)
    plain = dict(run.trainer.model.named_parameters())
    engine = dict(run.engine.model.named_parameters())
    changed = {name for name in plain if not torch.equal(engine[name], plain[name])}
    assert changed == {f"model.layers.{i}.mlp.experts.{p}" for i in (0, 1) for p in ("gate_up_proj", "down_proj")}


def test_shared_experts_are_quantised_too(toy_run):
    run = toy_run(**NVFP4, family="deepseek_v3")
    plain = dict(run.trainer.model.named_parameters())
    engine = dict(run.engine.model.named_parameters())
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    assert not torch.equal(engine[name], plain[name])
    assert torch.equal(engine["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"])
