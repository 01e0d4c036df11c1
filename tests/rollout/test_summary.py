"""Metrics of rewards, also of the entries of dict rewards, in training and in evaluation."""

from __future__ import annotations

import json
import statistics

import pytest

from miles_core.data.sample import Sample, Status
from miles_core.rollout.collect import rollout_metrics
from miles_testing import toy_run as run_toy


def test_every_numeric_part_is_a_metric(toy_run, tmp_path):
    (tmp_path / "reward.py").write_text(
        "async def reward(args, sample):\n"
        "    found = {'score': sample.index % 2, 'format': 0.5, 'why': 'text'}\n"
        "    return found | ({'rare': 2} if sample.index == 1 else {})\n"
    )
    (tmp_path / "held.jsonl").write_text(json.dumps({"input": "a"}) + "\n")
    run = toy_run(
        steps=1,
        custom_rm_path=tmp_path / "reward.py",
        reward_key="score",
        eval_prompt_data=f"held={tmp_path}/held.jsonl",
        eval_interval=1,
    )
    last = run.metrics[-1]
    assert (last["reward/part/score"], last["reward/part/format"], last["reward/part/rare"]) == (0.5, 0.5, 2.0)
    assert last["eval/part/format"] == last["eval/held/part/format"] == 0.5 and "reward/part/why" not in last


@pytest.mark.parametrize("rewards", [[[0.1] * 3, [0.1] * 3], [[0.1, 0.1], [0.3, 1.0, -2.5], [7.0]]])
def test_metrics_of_rewards(rewards):
    groups = [[Sample(reward=reward, response_length=i, index=i) for i, reward in enumerate(own)] for own in rewards]
    groups[0][0].status = Status.TRUNCATED
    metrics, flat = rollout_metrics(run_toy(steps=1).run, groups), [reward for own in rewards for reward in own]
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev(flat), rel=1e-12, abs=0)
    assert metrics["reward/mean"] == statistics.fmean(flat)
    assert (metrics["reward/max"], metrics["reward/min"]) == (max(flat), min(flat))
    assert metrics["reward/all_equal"] == sum(len(set(own)) == 1 for own in rewards) / len(rewards)
    assert metrics["rollout/truncated"] == 1 / len(flat) and metrics["rollout/samples"] == len(flat)
