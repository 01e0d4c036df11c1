"""A recorded step of several trainer ranks is repeated bit for bit."""

from __future__ import annotations

import json

import pytest

from miles_testing import toy_run
from miles_tools.replay.again import repeat_step
from miles_tools.replay.steps import step_directory


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "ranks"), [("full_shard", 2), ("no_shard", 2), ("full_shard", 3)])
def test_a_step_of_several_ranks_is_repeated_bit_for_bit(cluster, strategy, ranks, tmp_path):
    options = {"steps": 3, "record_steps": True, "save_interval": 2, "num_steps_per_rollout": 2, "runtime": "ray"}
    parts = {"actor_num_gpus_per_node": ranks, "rollout_num_gpus": 1, "sharding_strategy": strategy}
    if ranks > 2:  # a machine of the cluster has two processors
        parts |= {"actor_num_nodes": ranks, "actor_num_gpus_per_node": 1}
    directory = toy_run(["ray", "r3"], tmp_path / "run", **options, **parts).directory
    files = sorted(step_directory(directory, 3).glob("sums.policy.*.json"))
    assert len(files) == ranks
    parts_of = [json.loads(file.read_text())["steps"][0]["after"] for file in files]
    assert (parts_of[0] == parts_of[1]) == (strategy == "no_shard")  # sharded ranks record their own parts
    done = repeat_step(directory, 3, tmp_path / "again")
    assert (done.start, done.tolerance, done.difference) == (2, 0.0, None)
    assert all(row[3] for row in done.rows)
