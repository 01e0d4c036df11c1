"""Every prompt exactly once an epoch: counted outside of the run, over interruptions and resumes, for every schedule."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from miles_core.rollout.queue import Prompt

#: Writes the prompt of every group that is trained on, by its first token, where no checkpoint rolls it back.
COUNT = """
import json
from miles_core.plugin import hookimpl

@hookimpl
def on_batch(run, batch):
    prompts = dict(zip(batch.group.tolist(), batch.tokens[batch.starts].tolist()))
    with (run.directory.parent / "trained.jsonl").open("a") as file:
        file.write(json.dumps([run.step, list(prompts.values()), sorted(prompts)]) + "\\n")
"""

#: Interrupts its own process in the middle of a reward, once for each number in the file.
REWARD = """
import asyncio, json, os, signal
from pathlib import Path

async def reward(args, sample):
    path = Path(__file__).with_name("interrupts.json")
    waiting = json.loads(path.read_text())
    if waiting and sample.index >= waiting[0]:
        path.write_text(json.dumps(waiting[1:]))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.02)
    response = sample.tokens[sample.prompt_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""

PROMPTS, STEPS = 8, 12  # of two groups
MODES = {
    "sync": {"schedule": "sync"},
    "sync partial": {"schedule": "sync", "partial_rollout": True, "over_sampling_batch_size": 4},
    "ahead": {"schedule": "ahead"},
    "ahead partial": {"schedule": "ahead", "partial_rollout": True, "over_sampling_batch_size": 3},
    "async": {"schedule": "async", "max_weight_staleness": 2},
    "async whole": {"schedule": "async", "max_weight_staleness": 2, "partial_rollout": False},
}


def trained(tmp_path):
    return [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]


@pytest.fixture
def run(toy_run, tmp_path):
    """``run(**options)``: a toy run, counted and interrupted, and continued until its steps are complete; how often it
    was begun."""
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "reward.py").write_text(REWARD)

    def call(interrupts, **options):
        (tmp_path / "interrupts.json").write_text(json.dumps(interrupts))
        given = {"custom_rm_path": tmp_path / "reward.py", "rollout_max_response_len": 8, "steps": STEPS, **options}
        begun, done = 1, toy_run([str(tmp_path / "count.py")], directory=tmp_path / "run", **given)
        while done.run.step < STEPS:
            assert done.run.stop_requested
            where = {"load": tmp_path / "run", "save": None} if (tmp_path / "run/checkpoints").exists() else {}
            directory = None if where else tmp_path / "run"
            begun, done = begun + 1, toy_run([str(tmp_path / "count.py")], directory=directory, **given, **where)
        return begun, done

    return call


def check(tmp_path, done):
    """Every step once, every group once, every prompt as often as any other; what is out comes next."""
    steps = trained(tmp_path)
    assert [step for step, _, _ in steps] == list(range(STEPS))
    groups = [group for _, _, numbers in steps for group in numbers]
    assert len(groups) == len(set(groups))
    seen = Counter(prompt for _, prompts, _ in steps for prompt in prompts)
    saved = done.directory / f"checkpoints/step_{STEPS:08d}/state/run.json"
    position = json.loads(saved.read_text())["data"]
    out = [Prompt.from_json(p).tokens[0] for p in (*position["prompts"]["waiting"], *position.get("held", ()))]
    issued, source = seen + Counter(out), position["prompts"]["source"]
    assert issued.total() == PROMPTS * source["epoch"] + source["offset"]
    assert len(issued) == PROMPTS and max(issued.values()) - min(issued.values()) <= 1
    if not out:
        assert set(seen.values()) == {STEPS * 2 // PROMPTS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interrupts", [[], [18, 50]], ids=["whole", "interrupted"])
def test_each_is_trained_on_once_an_epoch(run, tmp_path, mode, interrupts):
    begun, done = run(interrupts, **MODES[mode])
    assert begun == 1 + len(interrupts)
    check(tmp_path, done)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(run, tmp_path, toy_run, mode):
    run([], save_interval=5, **MODES[mode])
    before = [record for record in trained(tmp_path) if record[0] < 5]  # the rest was never saved
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(record) + "\n" for record in before))
    load = tmp_path / "run/checkpoints/step_00000005"
    options = {"custom_rm_path": tmp_path / "reward.py", "rollout_max_response_len": 8, "steps": STEPS, **MODES[mode]}
    check(tmp_path, toy_run([str(tmp_path / "count.py")], directory=tmp_path / "again", load=load, **options))
