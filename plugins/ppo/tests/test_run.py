"""A critic learns next to its policy: as a model of its own or as a head on the policy's trunk, in one process and in several."""

import json
from importlib.resources import files
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from miles_core.plugin import ConfigError
from miles_testing import HeadContract, LearnContract, WeightsContract, toy_run

#: A runtime with trainer and engines in separate processes, loaded by its path.
REMOTE = str(files("miles_testing") / "doubles" / "remote.py")
OPTIONS = {"advantage_estimator": "ppo", "critic_lr": 1e-2, "lr": 1e-3, "normalize_advantages": True}
SHARED = {**OPTIONS, "critic_trunk": "policy"}


class TestCritic(LearnContract, HeadContract):
    plugins = ("ppo",)
    options = OPTIONS


class TestHeadOnTheTrunk(LearnContract, HeadContract, WeightsContract):
    plugins = ("ppo",)
    options = SHARED


def weights(run):
    return {name: tensor.clone() for name, tensor in run.trainer.model.state_dict().items()}


def test_policy_and_critic_learn_the_toy_task(tmp_path):
    done = toy_run(["ppo"], tmp_path / "run", steps=40, rollout_batch_size=8, export_hf=tmp_path / "hf", **OPTIONS)
    losses = [record["critic/train/value_loss"] for record in done.metrics]
    rewards = [record["reward/mean"] for record in done.metrics]
    explained = [record["critic/ppo/explained_variance"] for record in done.metrics]
    assert mean(losses[-5:]) < 0.5 * mean(losses[:3])
    assert mean(rewards[-8:]) > mean(rewards[:8]) + 0.1
    assert mean(explained[-8:]) > mean(explained[:8])
    assert done.parts[1].engine is None and done.run.policies[1].trained == 40 * 8
    names = json.dumps(sorted(p.name for p in (tmp_path / "hf").iterdir()))
    assert "config.json" in names and "critic" not in names  # the policy alone, without a folder of its own


def test_a_head_on_the_trunk_learns_with_its_policy(tmp_path):
    options = {**SHARED, "critic_lr": 5e-2, "verify_logprobs": True, "export_hf": tmp_path / "hf"}
    done = toy_run(["ppo"], tmp_path / "run", steps=40, rollout_batch_size=8, **options)
    losses = [record["train/value_loss"] for record in done.metrics]
    rewards = [record["reward/mean"] for record in done.metrics]
    assert mean(losses[-5:]) < 0.5 * mean(losses[:3])
    assert mean(rewards[-8:]) > mean(rewards[:8]) + 0.1
    assert len(done.parts) == 1 and done.metrics[-1]["verify/abs_log_prob_max"] < 1e-4
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert exported and not [name for name in exported if "value" in name]


def test_workers_in_other_processes_learn_the_same():
    options = {**OPTIONS, "kl_coef": 0.1}
    here = toy_run(["ppo"], steps=3, **options)
    there = toy_run(["ppo", REMOTE], steps=3, runtime="remote", **options)
    for name in ("critic/train/value_loss", "critic/ppo/explained_variance", "train/grad_norm", "reward/mean"):
        assert [m[name] for m in here.metrics] == [m[name] for m in there.metrics]


def test_the_critic_may_learn_first_alone():
    done = toy_run(["ppo"], steps=2, num_critic_only_steps=1, **OPTIONS)
    assert "train/loss" not in done.metrics[0] and "critic/train/value_loss" in done.metrics[0]
    assert "train/loss" in done.metrics[1] and done.run.policy.trained == 1


def test_a_head_that_learns_alone_leaves_the_trunk_as_it_is():
    options = {**SHARED, "weight_decay": 0.1, "aux_loss_coef": 0.1}
    alone = toy_run(["ppo"], steps=2, num_critic_only_steps=1, lr_warmup_iters=1000000, **options)
    before = load_file(f"{alone.run.config.model.hf_checkpoint}/model.safetensors")
    name = "model.embed_tokens.weight"
    # the trunk took one step, at a millionth of the learning rate
    torch.testing.assert_close(weights(alone)[name], before[name].float(), rtol=0, atol=1e-7)
    assert alone.metrics[0]["train/grad_norm"] == 0 and "train/loss" not in alone.metrics[0]
    assert alone.metrics[1]["train/grad_norm"] > 0 and alone.metrics[0]["train/grad_norm/critic"] > 0
    assert weights(alone)["miles_value_head.inner.weight"].abs().max() > 0


def test_a_detached_head_does_not_change_the_policy():
    plain = {**SHARED, "normalize_advantages": False, "lambd": 1.0, "clip_grad": 0}
    detached = toy_run(["ppo"], steps=1, critic_detach_trunk=True, **plain)
    attached = toy_run(["ppo"], steps=1, value_loss_coef=1e-9, **plain)
    # at the first step the head is zero, so its gradient does not reach the trunk either way
    for name, tensor in weights(attached).items():
        if not name.startswith("miles_value_head"):
            torch.testing.assert_close(weights(detached)[name], tensor, rtol=0, atol=0)
    two = [
        toy_run(["ppo"], steps=2, **more, **plain) for more in ({"critic_detach_trunk": True}, {"value_loss_coef": 1.0})
    ]
    assert two[0].metrics[1]["train/grad_norm"] != two[1].metrics[1]["train/grad_norm"]


def test_micro_batches_do_not_change_a_step():
    whole = toy_run(["ppo"], steps=2, clip_grad=0, **SHARED)
    split = toy_run(["ppo"], steps=2, clip_grad=0, micro_batch_size=3, **SHARED)
    for one, two in zip(whole.metrics, split.metrics, strict=True):
        names = [n for n in one if n.startswith(("ppo/", "train/value", "train/loss", "train/grad_norm"))]
        assert len(names) > 6
        assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=2e-4, abs=1e-6)


def test_a_kl_in_the_reward_lowers_the_returns():
    found = toy_run(["ppo"], steps=2, kl_coef=10.0, **OPTIONS)
    first, second = found.metrics
    assert first["train/ref_kl"] == pytest.approx(0, abs=1e-7)
    assert first["critic/train/returns"] == pytest.approx(first["reward/mean"], abs=1e-5)
    assert abs(second["critic/train/returns"] - second["reward/mean"]) > 1e-3
    shared = toy_run(["ppo"], steps=1, kl_coef=10.0, num_steps_per_rollout=2, **SHARED)
    assert shared.metrics[0]["train/returns"] == pytest.approx(first["critic/train/returns"], abs=1e-5)


@pytest.mark.parametrize(("steps", "expected"), [(1, [1, 8]), (2, [2, 2])])
def test_a_critic_makes_eight_steps_unless_its_policy_makes_several(steps, expected):
    done = toy_run(["ppo"], steps=1, rollout_batch_size=8, num_steps_per_rollout=steps, **OPTIONS)
    assert [policy.trained for policy in done.run.policies] == expected


def test_the_critic_has_an_optimizer_and_a_schedule_of_its_own():
    options = {**OPTIONS, "critic_lr_warmup_iters": 4, "critic_steps_per_rollout": 2, "critic_weight_decay": 0.0}
    done = toy_run(["ppo"], steps=2, **options)
    assert done.run.policies[1].trained == 4 and done.run.policy.trained == 2
    rates = [m["critic/train/lr"] for m in done.metrics]
    assert rates == pytest.approx([0.00375, 0.00875])  # means over two steps of 1/4, 2/4 and 3/4, 4/4
    assert [m["train/lr"] for m in done.metrics] == [1e-3, 1e-3]


def test_a_critic_starts_from_a_checkpoint_of_its_own(tmp_path):
    first = toy_run(["ppo"], tmp_path / "run", steps=1, export_hf=tmp_path / "hf", **OPTIONS)
    second = toy_run(["ppo"], steps=1, critic_load=tmp_path / "hf", **OPTIONS)
    assert second.run.policies[1].hf_checkpoint == str(tmp_path / "hf")
    assert first.metrics[0]["critic/train/grad_norm"] != second.metrics[0]["critic/train/grad_norm"]


@pytest.mark.parametrize(
    ("options", "name"),
    [(OPTIONS, "critic/train/value_loss"), ({**SHARED, "critic_lr_warmup_iters": 4}, "train/value_loss")],
    ids=["own", "policy"],
)
def test_a_resumed_run_goes_on_with_its_critic(tmp_path, options, name):
    whole = toy_run(["ppo"], steps=3, **options)
    toy_run(["ppo"], tmp_path / "run", steps=2, **options)
    resumed = toy_run(["ppo"], directory=None, save=None, load=tmp_path / "run", steps=3, **options)
    assert resumed.metrics[-1][name] == pytest.approx(whole.metrics[-1][name], rel=1e-5)


def test_two_policies_have_a_critic_each(tmp_path):
    (tmp_path / "two.yaml").write_text("policies: {left: {lr: 0.01}, right: {critic_lr: 0.5, gamma: 0.9}}")
    (tmp_path / "turns.py").write_text(
        "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_sample(run, sample):\n"
        "    sample.policy = run.policies[sample.group_index % 2].name\n"
    )
    options = {**OPTIONS, "config": tmp_path / "two.yaml", "lr": None, "critic_lr": None}
    done = toy_run(["ppo", str(tmp_path / "turns.py")], steps=1, **options)
    assert [p.name for p in done.run.policies] == ["left", "right", "critic_left", "critic_right"]
    found = done.metrics[0]
    assert found["critic_left/train/lr"] == 1e-5 and found["critic_right/train/lr"] == 0.5
    assert done.run.config_of(done.run.policies[3]).algorithm.gamma == 0.9


def test_without_the_plugin_the_estimator_names_who_provides_it():
    with pytest.raises(ConfigError, match="ppo"):
        toy_run(advantage_estimator="pppo")


ESTIMATOR = """
from miles_core.plugin import Plugin
from miles_core.trainer import Needs, Objective
from miles_ppo.ppo import estimate

plugin = Plugin(
    name="mc", summary="lambda 1", version="1", core=">=0", provides={"advantage": {"mc": "make", "blind": "blind"}}
)


def make():
    def advantage(inputs):
        return estimate(inputs, inputs.batch.column("values"))[0]

    return Objective(advantage, needs=Needs(old=False, whole_step=False, columns=("values",)))


def blind():
    return lambda inputs: inputs.mask
"""


@pytest.mark.parametrize("trunk", ["own", "policy"])
def test_an_estimator_of_another_plugin_uses_the_critic(tmp_path, trunk):
    (tmp_path / "mc.py").write_text(ESTIMATOR)
    plugins = ["ppo", str(tmp_path / "mc.py")]
    found, expected = (
        toy_run(names, steps=2, lr=1e-2, critic_lr=1e-2, critic_trunk=trunk, advantage_estimator=estimator)
        for names, estimator in ((plugins, "mc"), (["ppo"], "ppo"))
    )
    for name, tensor in weights(found).items():
        torch.testing.assert_close(tensor, weights(expected)[name])


def test_an_estimator_that_does_not_read_values_is_refused(tmp_path):
    (tmp_path / "mc.py").write_text(ESTIMATOR)
    with pytest.raises(ConfigError, match="--advantage-estimator blind: it does not declare the column 'values'"):
        toy_run(["ppo", str(tmp_path / "mc.py")], advantage_estimator="blind")


def test_a_critic_with_experts_in_a_number_format_passes_the_self_check():
    """The check compares it as it was loaded: a rounded input may choose other experts in either of the two forwards."""
    options = {**OPTIONS, "rollout_precision": "nvfp4", "train_precision": "nvfp4", "emulate_precision": True}
    run = toy_run(["ppo"], steps=1, self_check=True, sizes={"moe_intermediate_size": 32}, **options)
    assert run.metrics[0]["critic/train/grad_norm"] > 0
