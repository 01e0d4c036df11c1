"""Every way out keeps the last completed step, and says where it is and how to go on."""

from __future__ import annotations

import json
import signal

import pytest

from miles_core.errors import DataError, NonFiniteError
from miles_core.observe.metrics import read
from miles_testing.doubles import remote

#: Fails, or raises a signal, in the middle of the second step, once.
REWARD = """
import os
from pathlib import Path

async def reward(args, sample):
    what = Path(__file__).with_name("what")
    if sample.index == 10 and what.exists():
        body = what.read_text()
        what.unlink()
        exec(body)
    response = sample.tokens[sample.prompt_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""


@pytest.fixture
def disturbed(tmp_path, toy_run):
    """``disturbed(body, **options)``: a run of three steps whose second is disturbed by ``body``."""
    (tmp_path / "reward.py").write_text(REWARD)

    def start(body, **options):
        (tmp_path / "what").write_text(body)
        return toy_run(directory=tmp_path / "run", steps=3, custom_rm_path=tmp_path / "reward.py", **options)

    return start


def numbers(directory):
    return [
        {n: v for n, v in record.items() if "time" not in n and "second" not in n}
        for record in read(directory / "metrics.jsonl")
    ]


def test_an_error_in_a_rollout(disturbed, tmp_path, toy_run):
    with pytest.raises(DataError, match="no such answer") as caught:
        disturbed("raise ValueError('no such answer')", rollout_shuffle=True)
    (ending,) = caught.value.__notes__
    assert ending.splitlines() == [
        f"checkpoint: {tmp_path}/run/checkpoints/step_00000001",
        f"report: miles report {tmp_path}/run",
        f"to continue: miles train --load {tmp_path}/run",
    ]
    assert "no such answer" in (tmp_path / "run/run.log").read_text()
    assert "no such answer" in json.loads((tmp_path / "run/ending.json").read_text())["why"]
    options = {"custom_rm_path": tmp_path / "reward.py", "rollout_shuffle": True}
    toy_run(directory=None, save=None, load=tmp_path / "run", steps=3, **options)
    toy_run(directory=tmp_path / "whole", steps=3, **options)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert json.loads((tmp_path / "run/ending.json").read_text())["why"] == "finished"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals(disturbed, tmp_path, name):
    number = getattr(signal, name)
    outside = signal.signal(number, signal.SIG_DFL)  # ignored under nohup, and then by a run too
    try:
        disturbed(f"os.kill(os.getpid(), {int(number)})", log_level="info")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, outside)
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    step = int(checkpoint.name[-1])
    assert 1 <= step < 3
    assert f"stopped by {name}; {step} of 3 steps are complete" in (tmp_path / "run/run.log").read_text()


def failing_learn(monkeypatch, after):
    """The trainer's optimiser step number ``after`` + 1 of the whole run finds a gradient that is not finite."""
    from miles_embedded.trainer.trainer import EmbeddedTrainer

    plain, calls = EmbeddedTrainer.optimizer_step, []

    def optimizer_step(self):
        calls.append(1)
        if len(calls) > after:
            raise NonFiniteError("nan")
        return plain(self)

    monkeypatch.setattr(EmbeddedTrainer, "optimizer_step", optimizer_step)
    monkeypatch.setattr("miles_embedded.trainer.trainer.first_nonfinite_in_step", lambda *a: "it was")


#: A run in one process, and one whose workers behave as if they were elsewhere.
RUNTIMES = pytest.mark.parametrize("where", [{}, {"plugins": [str(remote.__file__)], "runtime": "remote"}])


@RUNTIMES
def test_a_training_step_that_changes_nothing(toy_run, tmp_path, monkeypatch, where):
    failing_learn(monkeypatch, after=2)
    with pytest.raises(NonFiniteError) as caught:
        toy_run(directory=tmp_path / "run", steps=3, **where)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
    assert "step_00000002" in caught.value.__notes__[-1]


@RUNTIMES
def test_a_step_that_was_trained_in_part_is_not_taken_for_a_complete_one(toy_run, tmp_path, monkeypatch, where):
    failing_learn(monkeypatch, after=3)
    with pytest.raises(NonFiniteError) as caught:
        toy_run(directory=tmp_path / "run", steps=3, num_steps_per_rollout=2, save_interval=1, **where)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000001"]
    assert "step 2 had changed the weights of step 1" in (tmp_path / "run/run.log").read_text()
    assert "step_00000001" in caught.value.__notes__[-1]


def test_keep(toy_run, tmp_path):
    toy_run(directory=tmp_path / "run", steps=4, save_interval=1, keep=2)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step_00000003", "step_00000004"]


def test_the_seed_is_that_of_every_global_generator(toy_run, tmp_path):
    (tmp_path / "reward.py").write_text(
        "import random, numpy, torch\n\nasync def reward(args, sample):\n"
        "    return random.random() + numpy.random.rand() + torch.rand(()).item()\n"
    )
    options = {"custom_rm_path": tmp_path / "reward.py", "steps": 1}
    runs = [toy_run(seed=seed, **options).metrics[0]["reward/mean"] for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_inside_a_running_event_loop(toy_run):
    import asyncio

    async def notebook():
        return toy_run(steps=1)

    assert len(asyncio.run(notebook()).metrics) == 1
