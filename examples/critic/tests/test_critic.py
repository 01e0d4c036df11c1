"""A critic learns next to its policy, in one process and in several."""

import json
from importlib.resources import files
from statistics import mean

import pytest

from miles_core.plugin import ConfigError, DataError, PlanError
from miles_testing import toy_run

#: A runtime with trainer and engines in separate processes, loaded by its path.
APART = str(files("miles_testing") / "doubles" / "apart.py")
OPTIONS = {"advantage_estimator": "ppo", "critic_lr": 1e-2, "lr": 1e-3, "normalize_advantages": True}


def test_policy_and_critic_learn_the_toy_task(tmp_path):
    done = toy_run(["critic"], tmp_path / "run", steps=40, rollout_batch_size=8, export_hf=tmp_path / "hf", **OPTIONS)
    losses = [record["critic/train/value_loss"] for record in done.metrics]
    rewards = [record["reward/mean"] for record in done.metrics]
    assert mean(losses[-5:]) < 0.5 * mean(losses[:3])
    assert mean(rewards[-8:]) > mean(rewards[:8]) + 0.1
    assert done.parts[1].engine is None and done.run.policies[1].trained == 40
    names = json.dumps(sorted(p.name for p in (tmp_path / "hf").iterdir()))
    assert "config.json" in names and "critic" not in names  # the policy alone, without a folder of its own


def test_workers_in_other_processes_learn_the_same():
    here = toy_run(["critic"], steps=3, **OPTIONS)
    there = toy_run(["critic", APART], steps=3, runtime="apart", **OPTIONS)
    for name in ("critic/train/value_loss", "train/grad_norm", "reward/mean"):
        assert [m[name] for m in here.metrics] == [m[name] for m in there.metrics]


def test_the_critic_may_learn_first_alone():
    done = toy_run(["critic"], steps=2, num_critic_only_steps=1, **OPTIONS)
    assert "train/loss" not in done.metrics[0] and "critic/train/value_loss" in done.metrics[0]
    assert "train/loss" in done.metrics[1] and done.run.policy.trained == 1


def test_a_resumed_run_goes_on_with_its_critic(tmp_path):
    whole = toy_run(["critic"], steps=3, **OPTIONS)
    toy_run(["critic"], tmp_path / "run", steps=2, **OPTIONS)
    resumed = toy_run(["critic"], directory=None, save=None, load=tmp_path / "run", steps=3, **OPTIONS)
    name = "critic/train/value_loss"
    assert resumed.metrics[-1][name] == pytest.approx(whole.metrics[-1][name], rel=1e-5)


def test_without_the_plugin_the_estimator_names_who_provides_it():
    with pytest.raises((ConfigError, PlanError, DataError), match="ppo"):
        toy_run(advantage_estimator="pppo")
