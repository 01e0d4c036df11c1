"""The learner on two ranks: whole-step statistics, normalisers and corrections are those of one process."""

import numpy as np
import pytest
import torch

from miles_core.config.load import load
from miles_core.contracts.emulation import Emulation
from miles_core.data.batch import means
from miles_core.data.sample import Sample
from miles_core.errors import DataError
from miles_core.run.make import make_run
from miles_core.run.prepare import apply_plan, prepare
from miles_core.train.data_shard import DataShard, merge_metrics, split_by_replica
from miles_core.train.rank import Rank
from miles_testing.toy import toy_arguments
from miles_testing.yardstick import copy_weights

#: What needs statistics of the whole step: corrections, whitening, normalisers, balancing; and two optimiser steps.
OPTIONS = {
    "tis_level": "sequence",
    "tis_batch_normalize": True,
    "normalize_advantages": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "aux_loss_coef": 0.1,
    "num_steps_per_rollout": 2,
    "lr": 1e-2,
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
                    rollout_log_probs=(random.normal(size=length) * 0.3 - 3.5).tolist(),
                    group_index=group,
                    index=len(samples),
                )
            )
    return samples


def made(words, directory):
    config = load(words)
    accepted, catalogue = prepare(config)
    run = make_run(apply_plan(config, accepted), accepted, catalogue, directory)
    trainer = run.hooks.make("trainer", "embedded", run=run, policy=run.policies[0])
    return Rank(run, run.policies[0], trainer)


def learned(words, directory, groups):
    rank, samples = made(words, directory), rollout(groups)
    mine = split_by_replica(samples, rank.run.config.train, rank.world.replicas)[rank.world.replica]
    before = rank.log_probs(mine.samples)
    rank.take_snapshot(0)
    pairs, _ = rank.learn(mine, 0)
    now, then = (rank.log_probs(mine.samples, Emulation(snapshot=snapshot)) for snapshot in (False, True))
    for old, new, kept in zip(before, now, then, strict=True):
        np.testing.assert_allclose(kept, old, atol=1e-4)
        assert not np.allclose(new, old, atol=1e-4)
    supervised = rank.supervise(samples[rank.world.replica :: rank.world.replicas], 1e-2)
    return pairs | supervised, copy_weights(rank.trainer)


@pytest.mark.parametrize(("groups", "strategy"), [(3, "full_shard"), (3, "no_shard"), (1, "full_shard")])
def test_two_ranks_learn_what_one_process_learns(ranks, groups, strategy, tmp_path):
    words = toy_arguments(["tis"], tmp_path, sharding_strategy=strategy, **OPTIONS)
    pairs, weights = learned(words, tmp_path, groups)
    found = ranks.run(learned, words, tmp_path, groups)
    metrics, expected = merge_metrics([p for p, _ in found]), means(pairs)
    assert metrics.keys() == expected.keys()
    assert {"tis/weight_square_mean", "train/load_balance", "sft/loss"} <= metrics.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=0, atol=1e-4)


def run_divided_step(words, directory, groups):
    """Two calls whose gradients add up, and one optimizer step."""
    rank, samples = made(words, directory), rollout(groups)
    for sample in samples:
        sample.fields = {"advantages": [sample.reward] * sample.response_length}
    metrics, log_probs = [], []
    for part in (samples[:4], samples[4:]):
        mine = [sample for sample in part if sample.group_index % rank.world.replicas == rank.world.replica]
        pairs, found = rank.forward_backward(mine, "ppo", {})
        metrics.append(pairs)
        log_probs.append(dict(zip([sample.index for sample in mine], found, strict=True)))
    return metrics, log_probs, rank.apply_gradients(1e-2), copy_weights(rank.trainer)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_two_ranks_hold_the_gradients_of_one_process(ranks, strategy, tmp_path):
    """In the first call one rank has no samples."""
    words = toy_arguments([], tmp_path, sharding_strategy=strategy, adam_eps=1e-2)
    metrics, log_probs, stepped, weights = run_divided_step(words, tmp_path, 3)
    found = ranks.run(run_divided_step, words, tmp_path, 3)
    for call in range(2):
        merged = merge_metrics([each[0][call] for each in found])
        for name, value in means(metrics[call]).items():
            assert merged[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
        seen = {index: column for each in found for index, column in each[1][call].items()}
        assert seen.keys() == log_probs[call].keys()
        for index, column in log_probs[call].items():
            np.testing.assert_allclose(seen[index], column, atol=1e-4)
    assert merge_metrics([each[2] for each in found])["train/grad_norm"] == pytest.approx(
        means(stepped)["train/grad_norm"], rel=1e-3
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][3][name], tensor, rtol=0, atol=1e-4)


COLUMN = """
from miles_core.data import Field
from miles_core.plugin import Plugin
from miles_core.trainer import Needs

plugin = Plugin(
    name="column", summary="an advantage that is a column", version="1", core=">=0",
    fields=(Field("seen", "float32", "response"),), provides={"advantage": {"column": "make_advantage"}},
)

def make_advantage():
    def column(inputs):
        return inputs.batch.column("seen")
    column.needs = Needs(old=False, whole_step=False, columns=("seen",))
    return column
"""


def test_an_advantage_finds_its_columns_on_a_rank_without_samples(tmp_path):
    (tmp_path / "column.py").write_text(COLUMN)
    words = toy_arguments([str(tmp_path / "column.py")], tmp_path, advantage_estimator="column")
    rank = made(words, tmp_path)
    pairs, seen = rank.learn(DataShard([], [], 1, [], 0), 0)
    assert pairs["train/grad_norm"][0] == 0 and seen == []
    with pytest.raises(DataError, match="reads the column 'seen', which no sample has"):
        rank.learn(split_by_replica(rollout(1), rank.run.config.train, 1)[0], 0)
