"""A critic on two ranks (FSDP2 and replicated) learns what it learns in one process, also if one rank has no samples."""

import numpy as np
import pytest
import torch

from miles_core.config.load import load
from miles_core.data import Sample
from miles_core.data.batch import means
from miles_core.run.make import make_run
from miles_core.run.prepare import apply_plan, prepare
from miles_core.train.data_shard import merge_metrics, split_by_replica
from miles_core.train.rank import Rank
from miles_testing.toy import toy_arguments
from miles_testing.yardstick import copy_weights

OPTIONS = {
    "advantage_estimator": "ppo",
    "normalize_advantages": True,
    "lambd": 0.9,
    "num_steps_per_rollout": 2,
    "lr": 1e-2,
    "critic_lr": 1e-2,
    "adam_eps": 1e-2,
}


def rollout(groups):
    random = np.random.default_rng(0)
    samples = []
    for group in range(groups):
        for _ in range(4):
            tokens, length = random.integers(3, 30, 9).tolist(), int(random.integers(2, 6))
            samples.append(
                Sample(
                    tokens=tokens,
                    response_length=length,
                    reward=float(random.normal()),
                    rollout_log_probs=[-3.5] * length,
                    group_index=group,
                    index=len(samples),
                )
            )
    return samples


def learned(words, directory, groups):
    """Attach values and learn twice, as the driver would have each rank do; returns metrics and weights of policy and critic."""
    config = load(words)
    accepted, catalogue = prepare(config)
    run = make_run(apply_plan(config, accepted), accepted, catalogue, directory)
    run.hooks.on("on_start", run=run)
    ranks = {p.name: Rank(run, p, run.hooks.make("trainer", "embedded", run=run, policy=p)) for p in run.policies}
    first = ranks["policy"]
    valued = ranks.get("critic", first)
    metrics = {}
    for step in range(2):
        share = split_by_replica(rollout(groups), run.config.train, first.world.replicas)[first.world.replica]
        for sample, columns in zip(share.samples, valued.columns(share.samples, ("values",), 0, "old"), strict=True):
            sample.fields |= columns
        for name, rank in ranks.items():
            pairs, _ = rank.learn(share, step)
            metrics |= {f"{step}/{name}/{metric}": pair for metric, pair in pairs.items()}
    return metrics, {f"{name}/{n}": t for name, rank in ranks.items() for n, t in copy_weights(rank.trainer).items()}


@pytest.mark.parametrize(
    ("trunk", "groups", "strategy", "alone"),
    [
        ("own", 1, "full_shard", 0),
        ("policy", 3, "full_shard", 1),
        ("policy", 1, "full_shard", 0),
        ("policy", 3, "no_shard", 1),
    ],
)
def test_two_ranks_learn_what_one_process_learns(ranks, trunk, groups, strategy, alone, tmp_path):
    only = {"num_critic_only_steps": alone} if alone else {}
    words = toy_arguments(["ppo"], tmp_path, critic_trunk=trunk, sharding_strategy=strategy, **only, **OPTIONS)
    pairs, weights = learned(words, tmp_path, groups)
    found = ranks.run(learned, words, tmp_path, groups)
    metrics, expected = merge_metrics([p for p, _ in found]), means(pairs)
    assert metrics.keys() == expected.keys()
    assert any(name.endswith("ppo/errors_square") for name in metrics)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=5e-4, abs=1e-5), name
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=0, atol=2e-4, msg=name)
