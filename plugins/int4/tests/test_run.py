"""int4 in the loop: the toy run, and what quantisation-aware training buys."""

import pytest
import torch

from miles_core.plugin import ConfigError

INT4 = {"plugins": ["int4"], "rollout_precision": "int4", "int4_group_size": 16}


def gap(metrics):
    return sum(step["mismatch/abs_log_prob"] for step in metrics) / len(metrics)


def sides(run):
    """Parameters of trainer and engine."""
    trainer = run.trainer.model
    return dict(trainer.named_parameters()), dict(run.engine.model.named_parameters())


def test_the_environment_turns_it_on(toy_run, monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "16")
    run = toy_run()
    assert run.run.config.rollout.precision == run.run.config.train.precision == "int4"
    assert gap(run.metrics) < 1e-5


def test_experts_only_leaves_attention_alone(toy_run):
    plain, engine = sides(toy_run(**INT4, train_precision="int4", int4_scope="experts"))
    attention, experts = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(engine[attention], plain[attention])
    assert not torch.equal(engine[experts], plain[experts])
    assert {round(float(v), 4) for v in _codes(engine[experts][0])} <= set(range(-7, 8))


def _codes(expert):
    """The values of one expert over the scales their groups must have."""
    groups = expert.detach().reshape(expert.shape[0], -1, 16)
    return (groups / (groups.abs().amax(-1, keepdim=True) / 7)).flatten()


def test_skipped_layers_stay_as_they_are_on_both_sides(toy_run):
    plain, engine = sides(toy_run(**INT4, train_precision="int4", int4_skip_layers="lm_head,embed,layer_norm,v_proj"))
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(engine[name], plain[name])


def test_a_group_size_that_does_not_fit_is_refused_with_those_that_do(toy_run):
    with pytest.raises(ConfigError, match=r"\[32, 16\] cannot be stored as int4: .* --int4-group-size 16 would"):
        toy_run(**{**INT4, "int4_group_size": 32})
