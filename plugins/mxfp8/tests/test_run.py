"""mxfp8 in the loop: the toy run, and what unified precision buys."""

import pytest
import torch

from miles_core.plugin import ConfigError

MXFP8 = {"plugins": ["mxfp8"], "rollout_precision": "mxfp8", "emulate_precision": True}
SIZES = {"moe_intermediate_size": 32}  # the toy model's experts have 16 columns, less than a block


def gap(metrics):
    return sum(step["mismatch/abs_log_prob"] for step in metrics) / len(metrics)


def test_the_recipe_is_the_unified_run(toy_run):
    run = toy_run(fp8_recipe="mxfp8", emulate_precision=True, sizes=SIZES)
    assert run.run.config.rollout.precision == run.run.config.train.precision == "mxfp8"
    assert gap(run.metrics) < 1e-5


def test_skipped_layers_stay_as_they_are_on_both_sides(toy_run):
    run = toy_run(**MXFP8, train_precision="mxfp8", fp8_skip_layers="self_attn", sizes=SIZES)
    plain = dict(run.trainer.model.named_parameters())
    engine = dict(run.engine.model.named_parameters())
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(engine[name], plain[name])


def test_a_model_that_does_not_fit_is_refused_by_name(toy_run):
    with pytest.raises(
        ConfigError, match=r"down_proj\.weight \[32, 16\] cannot be stored as mxfp8: .* of 32: 32, not 16"
    ):
        toy_run(**MXFP8)


def test_the_gradient_of_a_value_head_is_narrower_than_a_block_and_stays_as_it_is(toy_run):
    options = {"rollout_mxfp8": True, "train_mxfp8": True, "emulate_precision": True, "quantized_dgrad": True}
    run = toy_run(
        ["ppo"], family="qwen3", sizes={"intermediate_size": 64}, steps=1, advantage_estimator="ppo", **options
    )
    assert run.metrics[0]["critic/train/grad_norm"] > 0
