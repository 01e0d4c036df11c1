"""A recorded step of several trainer ranks is repeated bit for bit."""

from __future__ import annotations

import json

import pytest

from miles_testing import toy_run
from miles_tools.replay.again import repeat_step
from miles_tools.replay.steps import step_directory


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_step_of_several_ranks_is_repeated_bit_for_bit(cluster, strategy, tmp_path):
    options = {"steps": 3, "record_steps": True, "save_interval": 2, "num_steps_per_rollout": 2, "runtime": "ray"}
    parts = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "sharding_strategy": strategy}
    directory = toy_run(["ray", "r3"], tmp_path / "run", **options, **parts).directory
    files = sorted(step_directory(directory, 3).glob("sums.policy.*.json"))
    assert len(files) == 2
    weights = [json.loads(file.read_text())["steps"][0]["after"] for file in files]
    assert (weights[0] == weights[1]) == (strategy == "no_shard")  # sharded ranks record their own parts
    done = repeat_step(directory, 3, tmp_path / "again")
    assert (done.start, done.tolerance, done.difference) == (2, 0.0, None)
    assert all(row[3] for row in done.rows)
