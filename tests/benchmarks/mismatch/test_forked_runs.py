"""Runs in forked processes that go in step."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.mismatch import forked_runs


def state(pid: int) -> str:
    """State of a process, such as S (sleeps) or T (stopped)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, expected: str) -> None:
    end = time.monotonic() + 5
    while state(pid) != expected:
        assert time.monotonic() < end, f"the process is in state {state(pid)}, not {expected}"
        time.sleep(0.01)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads the state of processes in /proc")
def test_a_run_that_is_ahead_waits_until_the_slowest_has_caught_up(tmp_path):
    started = []
    for name, steps in (("slow", 3), ("fast", 9)):
        run = forked_runs.ForkedRun(tmp_path / name, "", 100)
        run.place.mkdir()
        (run.place / "metrics.jsonl").write_text("{}\n" * steps)
        process = subprocess.Popen(["sleep", "60"])
        double = SimpleNamespace(pid=process.pid, is_alive=lambda: True, kill=process.kill)
        started.append(forked_runs._Started(run, double, 0.0))
    slow, fast = started
    try:
        forked_runs.pace(started, 0)
        assert not fast.stopped
        forked_runs.pace(started, 5)
        wait_for_state(fast.process.pid, "T")
        assert not slow.stopped
        (slow.run.place / "metrics.jsonl").write_text("{}\n" * 4)
        forked_runs.pace(started, 5)
        wait_for_state(fast.process.pid, "S")
    finally:
        for each in started:
            each.process.kill()


def test_steps_are_the_complete_lines_of_metrics(tmp_path):
    run = forked_runs.ForkedRun(tmp_path, "", 100)
    assert run.count() == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.count() == 2
