"""Two ranks learn preferences as one process does, also if one rank has no pair or row."""

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
from miles_offline.kto import REFERENCE
from miles_offline.reward_model import MARGIN, SCORES
from miles_testing.toy import toy_arguments
from miles_testing.yardstick import copy_weights


def rollout(pairs):
    random = np.random.default_rng(0)
    samples = []
    for group in range(pairs):
        for reward in (1.0, 0.0):
            tokens, length = random.integers(3, 30, 9).tolist(), int(random.integers(2, 6))
            made = {
                "tokens": tokens,
                "response_length": length,
                "reward": reward,
                "group_index": group,
                "rollout_id": group,
            }
            samples.append(Sample(index=len(samples), **made))
    return samples


def rows(count):
    """Answers with labels, as the driver passes them on."""
    samples = rollout(count)[:count]
    for number, sample in enumerate(samples):
        sample.group_index = sample.rollout_id = number
        sample.fields[REFERENCE] = np.float64(0.5)
    return samples


def attach_scores(pairs):
    """Pairs with the scores before the step, as the driver passes them on."""
    samples = rollout(pairs)
    for number, sample in enumerate(samples):
        sample.loss_mask = [0] * (sample.response_length - 1) + [1]
        score = np.full(sample.response_length, 0.1 * number, np.float32)
        sample.fields |= {SCORES: score, MARGIN: np.float64(0.2)}
    return samples


def learned(words, directory, make, count):
    """Learn twice, as the driver would have each rank do; returns metrics and weights."""
    config = load(words)
    accepted, catalogue = prepare(config)
    run = make_run(apply_plan(config, accepted), accepted, catalogue, directory)
    run.hooks.on("on_start", run=run)
    rank = Rank(run, run.policy, run.hooks.make("trainer", "embedded", run=run, policy=run.policy))
    metrics = {}
    for step in range(2):
        share = split_by_replica(make(count), run.config.train, rank.world.replicas)[rank.world.replica]
        found, _ = rank.learn(share, step)
        metrics |= {f"{step}/{name}": pair for name, pair in found.items()}
    return metrics, copy_weights(rank.trainer)


@pytest.mark.parametrize(
    ("estimator", "make", "count", "strategy"),
    [
        ("dpo", rollout, 3, "full_shard"),
        ("dpo", rollout, 1, "full_shard"),
        ("dpo", rollout, 1, "no_shard"),
        ("kto", rows, 3, "full_shard"),
        ("kto", rows, 1, "full_shard"),
        ("reward_model", attach_scores, 3, "full_shard"),
        ("reward_model", attach_scores, 1, "no_shard"),
    ],
)
def test_two_ranks_learn_what_one_process_learns(ranks, estimator, make, count, strategy, tmp_path):
    options = {
        "advantage_estimator": estimator,
        "kl_coef": None if estimator == "reward_model" else 0.1,
        "custom_rm_path": None,
        "n_samples_per_prompt": None,
        "rollout_max_response_len": None,
        "lr": 1e-2,
    }
    words = toy_arguments(["offline"], tmp_path, sharding_strategy=strategy, adam_eps=1e-2, **options)
    alone, weights = learned(words, tmp_path, make, count)
    found = ranks.run(learned, words, tmp_path, make, count)
    metrics, expected = merge_metrics([p for p, _ in found]), means(alone)
    assert metrics.keys() == expected.keys() and "1/offline/reward_chosen" in metrics
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=5e-4, abs=1e-5), name
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=0, atol=2e-4, msg=name)
