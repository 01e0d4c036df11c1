"""Collecting groups: unfinished ones are aborted and their prompts come back first."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import DataError

STUCK = """
import asyncio

async def generate(args, sample, sampling_params):
    if sample.group_index in (0, 3):
        await asyncio.sleep(300)
    answer = await args.generate(sample.tokens)
    sample.tokens = sample.tokens + answer.tokens
    sample.response, sample.response_length = answer.text, len(answer.tokens)
    return sample
"""


def test_stuck_groups_are_aborted_and_their_prompts_come_first_next_time(toy_run, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    run = toy_run(
        steps=2,
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        custom_generate_function_path=tmp_path / "stuck.py",
    )
    prompts = [sample["prompt"] for sample in run.samples[::4]]
    # group 0 (a) was stuck, group 1 (b) was used; then a again as group 2, and c as group 3 was stuck
    assert prompts == ["b", "a"]
    (saved,) = (run.directory / "checkpoints").glob("*/state/run.json")
    waiting = json.loads(saved.read_text())["data"]["prompts"]["waiting"]
    assert [w["text"] for w in waiting] == ["c"]
    assert not run.engine.rows  # nothing is left in the engine


def test_groups_are_trained_in_the_order_of_their_prompts_however_they_finish(toy_run, tmp_path):
    (tmp_path / "late.py").write_text(STUCK.replace("(0, 3)", "(0,)").replace("300", "0.05"))
    (tmp_path / "watch.py").write_text(
        "from miles_core.plugin import hookimpl\n\n@hookimpl\ndef on_batch(run, batch):\n    run.state['index'] = batch.index\n"
    )
    run = toy_run([str(tmp_path / "watch.py")], steps=1, custom_generate_function_path=tmp_path / "late.py")
    assert run.run.state["index"].tolist() == list(range(8))


FAILING = """
from miles_core.data import Status

async def generate(args, sample, sampling_params):
    if WHEN:
        sample.status = Status.FAILED
        return sample
    answer = await args.generate(sample.tokens)
    sample.tokens = sample.tokens + answer.tokens
    sample.response_length = len(answer.tokens)
    return sample
"""


def test_a_group_whose_every_sample_failed_is_replaced(toy_run, tmp_path):
    (tmp_path / "broken.py").write_text(FAILING.replace("WHEN", "sample.group_index in (0, 3) or sample.index == 4"))
    run = toy_run(steps=2, rollout_batch_size=2, custom_generate_function_path=tmp_path / "broken.py")
    assert [m["rollout/samples"] for m in run.metrics] == [7.0, 8.0]  # groups 1 and 2, 4 and 5
    assert run.metrics[0]["rollout/failed"] == pytest.approx(5 / 12)
    assert {sample["group"] for sample in run.samples} <= {1, 2, 4, 5}


def test_a_function_that_always_fails_ends_the_run(toy_run, tmp_path):
    (tmp_path / "broken.py").write_text(FAILING.replace("WHEN", "True"))
    with pytest.raises(
        DataError, match=r"every sample of the last 20 groups failed, most recently of group \d+; see run.log"
    ):
        toy_run(custom_generate_function_path=tmp_path / "broken.py")
