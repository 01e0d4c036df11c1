"""Entries of dict rewards are metrics, in training and in evaluation."""

from __future__ import annotations

import json


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
