"""Evaluations that a request to stop falls on are made up by the run that goes on."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from miles_core.errors import DataError
from miles_core.observe.metrics import read
from miles_core.rollout.evaluate import Evaluator

#: Stops its own process in the evaluation of a step.
REWARD = """
import asyncio, os, signal
from pathlib import Path

async def reward(args, sample):
    flag = Path(__file__).with_name("stop")
    if sample.metadata.get("held_out") and flag.exists() and int(flag.read_text()) == 0:
        flag.unlink()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)
    elif sample.metadata.get("held_out") and flag.exists():
        flag.write_text(str(int(flag.read_text()) - 1))
    response = sample.tokens[sample.prompt_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""


@pytest.mark.parametrize(("after", "step"), [(1, 1), (3, 3), (0, 0)])
def test_a_stop_in_an_evaluation_postpones_it(toy_run, tmp_path, after, step):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"input": "z", "metadata": {"held_out": True}}) + "\n")
    options = {
        "custom_rm_path": tmp_path / "reward.py",
        "eval_prompt_data": tmp_path / "held_out.jsonl",
        "eval_interval": 1,
        "n_samples_per_eval_prompt": 1,
        "steps": 3,
    }
    whole = toy_run(directory=tmp_path / "whole", **options)
    (tmp_path / "stop").write_text(str(after))
    stopped = toy_run(directory=tmp_path / "run", **options)
    assert stopped.run.stop_requested and stopped.run.step == step
    assert "eval/reward" not in next((m for m in stopped.metrics if m["step"] == step), {})
    toy_run(directory=None, save=None, load=tmp_path / "run", **options)
    scores = [
        {m["step"]: m["eval/reward"] for m in records if "eval/reward" in m}
        for records in (whole.metrics, read(tmp_path / "run/metrics.jsonl"))
    ]
    assert scores[0] == scores[1] and sorted(scores[0]) == [0, 1, 2, 3]
    toy_run(
        directory=None, save=None, load=tmp_path / "run", **options
    )  # nothing is left to do, and nothing is done twice
    assert sum("eval/reward" in m for m in read(tmp_path / "run/metrics.jsonl")) == 4


def test_an_evaluation_without_a_prompt_that_fits_is_one_error():
    source = SimpleNamespace(length=3, state=dict, load_state=lambda state: None, next=lambda count: ["row"] * count)
    run = SimpleNamespace(config=SimpleNamespace(evaluation=SimpleNamespace(n_samples=1)))
    evaluator = Evaluator(run, {"legs": source}, lambda rows: [None] * len(rows), None, None)
    with pytest.raises(DataError, match=r"^--eval-prompt-data legs: all 3 prompts are too long or invalid"):
        asyncio.run(evaluator())
