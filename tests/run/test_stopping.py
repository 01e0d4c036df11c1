"""Limited time after SIGTERM, whatever the run does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from miles_core.cli.main import main
from miles_core.errors import OutOfTime
from miles_core.reward.custom import UserFunction
from miles_core.run import stopping
from miles_core.run.stopping import Deadline
from miles_embedded.model.load import load_model
from miles_embedded.model.self_check import check_scores
from miles_testing.tiny import tiny_checkpoint
from miles_testing.toy import toy_arguments


@pytest.fixture
def deadline(monkeypatch):
    """A deadline of one second that aborts the current work as always but leaves a slow machine a minute before the process exits; the
    handler of its signal is in place. A list holds what happened."""
    exits = []
    monkeypatch.setattr(stopping, "EXIT", 60.0)
    made = Deadline(1.0, lambda: exits.append("exit"))
    made.exits = exits
    before = signal.signal(signal.SIGALRM, made.interrupt)
    yield made
    made.close()
    signal.signal(signal.SIGALRM, before)


def test_what_waits_is_cancelled_and_may_still_save(deadline):
    saved = []

    async def run():
        deadline.begin(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            saved.append(True)
            raise

    async def main():
        with pytest.raises(OutOfTime, match=r"aborted 0.4 s after the signal \(--stop-within 1\)"):
            await deadline.limit(run())

    asyncio.run(main())
    assert saved and not deadline.exits


def test_what_blocks_the_main_thread_is_interrupted_there(deadline):
    async def run():
        deadline.begin(signal.SIGTERM)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)

    async def main():
        with pytest.raises(OutOfTime):
            await deadline.limit(run())

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 30


def test_a_run_that_ends_in_time_is_left_alone(deadline):
    async def run():
        deadline.begin(signal.SIGTERM)
        return 3

    assert asyncio.run(deadline.limit(run())) == 3
    deadline.close()
    assert not deadline.expired and all(
        t.name != "deadline" or not t.is_alive() or t.join(5) is None for t in threading.enumerate()
    )


def test_a_process_that_does_not_end_ends_itself():
    code = (
        "import signal, time\nfrom miles_core.run.stopping import Deadline\n"
        "d = Deadline(0.2, lambda: print('last words', flush=True))\nd.begin(signal.SIGTERM)\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 128 + signal.SIGTERM and "last words" in done.stdout


def test_a_stop_is_no_error_of_the_code_that_it_interrupts():
    """What turns any Exception into a verdict about a model, a file or a function lets it pass."""
    assert not issubclass(OutOfTime, Exception)

    def interrupted():
        raise OutOfTime("the step was aborted")

    with pytest.raises(OutOfTime):
        UserFunction(interrupted, "reward", "judge.py", False)()


def test_a_stop_during_the_self_check_is_no_verdict_about_the_model(tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path))

    def interrupted(sequences):
        raise OutOfTime("the step was aborted")

    def crowded(sequences):
        raise MemoryError

    with pytest.raises(OutOfTime):
        check_scores(model, {"packed sequences are scored": interrupted})
    with pytest.raises(MemoryError):
        check_scores(model, {"packed sequences are scored": crowded})


def test_a_run_that_is_stopped_at_its_start_says_so(tmp_path, monkeypatch):
    """SIGTERM while the main thread checks the model: the deadline raises there, and the run ends as stopped."""
    from miles_embedded.model import self_check

    def slow(model, sequence):
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(self_check, "_score_plain", slow)
    words = toy_arguments(directory=tmp_path / "run", steps=2, stop_within=2.0, self_check=True)
    assert main(["train", *words]) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "run/ending.json").read_text())["why"] == "stopped by SIGTERM"
