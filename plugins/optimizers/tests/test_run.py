"""Runs with each optimizer: bit-identical after a resume, metrics, policies of their own; plans that are refused."""

import pytest
import torch

from miles_core.plugin import PlanError
from miles_testing import OptimizerContract, plan, toy_run

OPTIONS = {
    "muon": {"optimizer": "muon", "muon_lr": 2e-3},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adamw-offload": {"optimizer": "adamw-offload", "offload_optimizer": True},
}


#: Without a learning rate of its own.
MUON = {"optimizer": "muon"}


class TestMuon(OptimizerContract):
    options = MUON


class TestEightBit(OptimizerContract):
    options = OPTIONS["adamw8bit"]


class TestOnTheHost(OptimizerContract):
    options = OPTIONS["adamw-offload"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_is_bit_identical(tmp_path, name):
    options = {**OPTIONS[name], "dtype": "bfloat16", "lr": 1e-3, "num_steps_per_rollout": 2, "lr_decay_style": "cosine"}
    options |= {"lr_decay_iters": 6, "clip_grad": 0.5}
    whole = toy_run(steps=3, **options)
    toy_run(directory=tmp_path / "run", steps=1, **options)
    again = toy_run(directory=None, save=None, load=tmp_path / "run", steps=3, **options)
    for one, two in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in one.items() if k.startswith("train/")} == {
            k: v for k, v in two.items() if k.startswith("train/")
        }
    with whole.trainer.optimizer.on_device(), again.trainer.optimizer.on_device():
        ours, theirs = whole.trainer.optimizer.tensors(), again.trainer.optimizer.tensors()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert whole.metrics[0]["train/grad_norm"] > 0.5  # clipping had something to do
    assert whole.metrics[-1]["train/lr"] < whole.metrics[0]["train/lr"]


def test_muon_leaves_embeddings_and_output_layer_to_adamw():
    done = toy_run(steps=1, optimizer="muon", muon_adjust_lr="original")
    names = {
        key: {n.partition(".")[2] for n in done.trainer.optimizer.tensors() if n.startswith(key)}
        for key in ("exp_avg.", "momentum_buffer.")
    }
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= names["exp_avg."]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names["momentum_buffer."]
    assert not names["exp_avg."] & names["momentum_buffer."]
    assert names["exp_avg."] | names["momentum_buffer."] == set(done.trainer.optimizer.masters)


def test_a_critic_may_have_another_optimizer():
    done = toy_run(
        ["ppo", "optimizers"], steps=1, advantage_estimator="ppo", critic_optimizer="adamw8bit", n_samples_per_prompt=2
    )
    critic = done.parts[1].learner.rank.trainer
    assert type(critic.optimizer._inner).__name__ == "EightBitAdamW"
    assert isinstance(done.trainer.optimizer._inner, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": "muon", "muon_lr": 1e-3, "lr": 0}, "follows the schedule of --lr"),
        ({"optimizer": "muon", "runtime": "ray", "actor_num_gpus_per_node": 2}, "orthogonalizes whole matrices"),
        ({"optimizer": "adamw8bit", "trainer": "megatron"}, "--use-precision-aware-optimizer"),
        ({"optimizer": "adamw-offload", "trainer": "megatron"}, "--optimizer-cpu-offload"),
        ({"optimizer": "muon", "trainer": "megatron"}, "divides matrices among ranks"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError) as error:
        plan(**options)
    assert why in str(error.value)


def test_accepted_on_several_ranks():
    for options in ({"optimizer": "muon", "sharding_strategy": "no_shard"}, {"optimizer": "adamw8bit"}):
        assert plan(runtime="ray", actor_num_gpus_per_node=2, **options)


def test_a_missing_torchao_is_refused_with_its_command():
    with pytest.raises(PlanError, match=r"pip install 'torchao>=0.17'"):
        plan(facts=["package.torchao=none"], optimizer="adamw8bit")
