"""Ctrl-C: the first ends the run at the last completed step, the second at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from miles_core.observe.metrics import read
from miles_testing.toy import toy_arguments

#: Interrupts its own process: the reward function runs in the middle of a rollout.
REWARD = """
import asyncio, os, signal
from pathlib import Path

async def reward(args, sample):
    flag = Path(__file__).with_name("interrupt")
    if sample.index == 10 and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)  # the other group of the second step is finished first
    response = sample.tokens[sample.prompt_length :]
    return sum(token % 2 == 0 for token in response) / len(response)
"""


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "reward.py"


def test_a_rollout_is_dropped_and_the_run_continues_as_if_nothing_had_happened(toy_run, tmp_path, reward):
    options = {"custom_rm_path": reward, "rollout_shuffle": True, "log_level": "info"}
    whole = toy_run(directory=tmp_path / "whole", steps=3, **options)
    (tmp_path / "interrupt").touch()
    stopped = toy_run(directory=tmp_path / "parts", steps=3, **options)
    assert stopped.run.stop_requested and stopped.run.step == 1
    assert [p.name for p in (tmp_path / "parts/checkpoints").iterdir()] == ["step_00000001"]
    assert "the unfinished rollout is dropped; 1 steps are complete" in (tmp_path / "parts/run.log").read_text()
    toy_run(directory=None, save=None, load=tmp_path / "parts", steps=3, **options)
    for one, two in zip(whole.metrics, read(tmp_path / "parts/metrics.jsonl"), strict=True):
        assert {n: v for n, v in one.items() if "time" not in n and "second" not in n} == {
            n: v for n, v in two.items() if "time" not in n and "second" not in n
        }
    weights = [
        load_file(d / "checkpoints/step_00000003/policy/trainer/model.safetensors")
        for d in (whole.directory, tmp_path / "parts")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_handler_is_gone_after_the_run(toy_run, reward, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    (tmp_path / "interrupt").touch()
    toy_run(custom_rm_path=reward)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_warm_start_leaves_nothing_and_can_be_started_again(toy_run, tmp_path, monkeypatch):
    from miles_core.train.local_learner import LocalLearner

    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"input": "a", "response": "bb"}) + "\n")
    options = {"directory": tmp_path / "run", "sft_data": pairs, "sft_steps": 5, "steps": 1}
    plain = LocalLearner.supervise

    async def supervise(self, samples, lr):
        os.kill(os.getpid(), signal.SIGINT)
        return await plain(self, samples, lr)

    monkeypatch.setattr(LocalLearner, "supervise", supervise)
    stopped = toy_run(**options)
    assert stopped.run.stop_requested and stopped.metrics == [] and not (tmp_path / "run/checkpoints").exists()
    monkeypatch.setattr(LocalLearner, "supervise", plain)
    assert [record["step"] for record in toy_run(**options).metrics] == [0, 1]


def test_an_engine_that_takes_its_time_to_come_up_does_not_hold_up_ctrl_c(toy_run, tmp_path, monkeypatch):
    from miles_embedded.engine.engine import EmbeddedEngine

    seen = []

    async def start(self):
        seen.append("start")
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(300)
        finally:
            seen.append("given up")

    async def stop(self):
        seen.append("stop")

    monkeypatch.setattr(EmbeddedEngine, "start", start)
    monkeypatch.setattr(EmbeddedEngine, "stop", stop)
    begun = time.monotonic()
    stopped = toy_run(directory=tmp_path / "run")
    assert stopped.run.stop_requested and stopped.run.step == 0 and time.monotonic() - begun < 60
    assert seen == ["start", "given up", "stop"]


def test_a_slow_tool_does_not_hold_up_ctrl_c(toy_run, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import asyncio, os, signal\n\nasync def reward(args, sample):\n"
        "    if sample.index == 0:\n        os.kill(os.getpid(), signal.SIGINT)\n    await asyncio.sleep(300)\n"
    )
    start = time.monotonic()
    stopped = toy_run(custom_rm_path=tmp_path / "slow.py")
    assert stopped.run.stop_requested and stopped.run.step == 0 and time.monotonic() - start < 60


COMMAND = """
import sys
from miles_core.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def started(tmp_path, body):
    """``miles train`` in a process of its own, whose reward function tells when it is first called."""
    (tmp_path / "reward.py").write_text(body)
    words = toy_arguments(directory=tmp_path / "run", custom_rm_path=tmp_path / "reward.py", steps=1000)
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "called").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    return process


def test_exit_code_130_and_a_checkpoint(tmp_path):
    process = started(
        tmp_path,
        "from pathlib import Path\n\nasync def reward(args, sample):\n"
        "    if sample.index == 20:\n        Path(__file__).with_name('called').touch()\n    return sample.index % 3\n",
    )
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in text
    step = read(tmp_path / "run/metrics.jsonl")[-1]["step"]
    assert step >= 2 and [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [f"step_{step:08d}"]


@pytest.mark.thorough
def test_a_second_ctrl_c_exits_at_once(tmp_path):
    process = started(
        tmp_path,
        "import time\nfrom pathlib import Path\n\nasync def reward(args, sample):\n"
        "    Path(__file__).with_name('called').touch()\n    time.sleep(0.2)\n    return 0.0\n",
    )
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert not (tmp_path / "run/checkpoints").exists()
