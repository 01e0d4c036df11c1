"""fp8 in the loop: the toy run, and what unified precision buys."""

import pytest
import torch

from miles_core.plugin import ConfigError
from miles_testing import plan

FP8 = {"rollout_fp8": True, "emulate_precision": True}


def test_the_engine_holds_the_trainers_quantised_weights(toy_run):
    run = toy_run(**FP8, train_fp8=True)
    trainer = run.trainer.model
    engine = dict(run.engine.model.named_parameters())
    plain = dict(trainer.named_parameters())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(engine[name], plain[name])
    untouched = "model.layers.0.mlp.gate.weight"
    assert torch.equal(engine[untouched], plain[untouched])


def test_a_selector_leaves_weights_alone_on_both_sides(toy_run):
    run = toy_run(**FP8, train_fp8=True, fp8_skip_layers="*.self_attn.*")
    trainer = dict(run.trainer.model.named_parameters())
    engine = dict(run.engine.model.named_parameters())
    assert torch.equal(
        engine["model.layers.1.self_attn.q_proj.weight"], trainer["model.layers.1.self_attn.q_proj.weight"]
    )
    assert not torch.equal(
        engine["model.layers.1.mlp.experts.down_proj"], trainer["model.layers.1.mlp.experts.down_proj"]
    )


@pytest.mark.parametrize("sides", [{}, {"train_fp8": True}])
def test_a_selector_that_matches_nothing_is_refused(toy_run, sides):
    with pytest.raises(ConfigError, match=r"--fp8-skip-layers: 'self_atn' matches none .* self_attn"):
        toy_run(**FP8, **sides, fp8_skip_layers="self_atn")


def test_power_of_two_scales_reach_the_engine(toy_run):
    run = toy_run(**FP8, train_fp8=True, fp8_power_of_two_scales=True)
    weight = dict(run.engine.model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(weight.bfloat16().float(), weight)
    other = toy_run(**FP8, train_fp8=True)
    weight = dict(other.engine.model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert not torch.equal(weight.bfloat16().float(), weight)


def test_quantised_gradients_change_a_step_and_no_forward_pass(toy_run):
    unified = {**FP8, "train_fp8": True, "family": "qwen3", "steps": 2}
    plain, rounded = toy_run(**unified), toy_run(**unified, quantized_dgrad=True)
    first, second = (run.metrics[0] for run in (plain, rounded))
    assert first["mismatch/abs_log_prob"] == second["mismatch/abs_log_prob"]
    assert 0 < abs(first["train/grad_norm"] / second["train/grad_norm"] - 1) < 0.1
    weights = [dict(run.trainer.model.named_parameters()) for run in (plain, rounded)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(*(each[name] for each in weights))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rollout_fp8": True}, r"--quantized-dgrad: it needs train.precision != bf16"),
        (
            {"rollout_int4": True, "train_int4": True, "int4_group_size": 16},
            r"--quantized-dgrad: int4 does not round the inputs of any linear",
        ),
    ],
)
def test_quantised_gradients_without_effect_are_refused(toy_run, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        toy_run(**options, emulate_precision=True, quantized_dgrad=True)


def test_quantised_gradients_are_the_embedded_trainers():
    options = {"rollout_fp8": True, "train_fp8": True, "quantized_dgrad": True, "device": "cuda", "trainer": "megatron"}
    options |= {"family": "qwen3", "sizes": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}}
    with pytest.raises(ConfigError, match=r"--quantized-dgrad: it needs .* trainer == embedded"):
        plan(["fp8"], ["hardware=H200"], **options)
