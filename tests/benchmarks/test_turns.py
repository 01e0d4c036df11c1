"""Processes that take turns step by step: only one of them works, and a process that a worker started can take its turns."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks.measure import Steps, Worker, alternate

STEPS = """
import json, os, sys, time
from pathlib import Path
from benchmarks.measure import Reporter, Steps

def work(name, log, uncounted, reporter):
    turn = Steps(reporter, 1, uncounted)
    reporter.send(versions={})
    for step in range(100):
        turn.wait()
        with Path(log).open("a") as file:
            print(f"{name} begins {step}", file=file, flush=True)
            time.sleep(0.01)
            print(f"{name} ends {step}", file=file)
        turn.report(seconds=step)
"""
MAIN = "\nwork(sys.argv[1], sys.argv[2], int(sys.argv[3]), Reporter())"
#: The worker only starts the process that steps, as verl's driver does.
PARENT = """
import subprocess
reporter = Reporter()
print("noise of the parent")
os.environ["PIPES"] = json.dumps(reporter.pipes)
code = CHILD + "work(sys.argv[1], sys.argv[2], int(sys.argv[3]), Reporter(json.loads(os.environ['PIPES'])))"
sys.exit(subprocess.run([sys.executable, "-c", code, *sys.argv[1:]], start_new_session=True, stdin=subprocess.DEVNULL).returncode)
"""


@pytest.fixture
def start(tmp_path):
    """Start a worker in the background; all are ended after the test."""
    workers = []

    def begin(name, code, uncounted=1):
        command = [sys.executable, "-c", code, name, str(tmp_path / "log"), str(uncounted)]
        workers.append(Worker(name, command, threads=1, wait=False, log=tmp_path / f"{name}.log"))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def test_only_one_process_works_at_a_time_also_where_another_one_steps_for_it(tmp_path, start):
    workers = [start("own", STEPS + MAIN), start("other", STEPS + f"\nCHILD = {STEPS!r}" + PARENT)]
    assert [worker.hello for worker in workers] == [{"versions": {}}] * 2
    assert not (tmp_path / "log").exists()  # ready, and no step before its turn
    noted = []
    reports = alternate(workers, 2, 1, lambda found: noted.append({name: len(r) for name, r in found.items()}))
    assert noted == [{"own": 1, "other": 1}, {"own": 2, "other": 2}]
    assert reports == {name: [{"seconds": 3.0}, {"seconds": 5.0}] for name in ("own", "other")}
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 24
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.replace("begins", "ends") == end
    order = [line.split()[0] for line in lines[::4]]
    assert order == ["own", "other", "other", "own", "own", "other"]


def test_a_side_that_is_alone_counts_every_step(start):
    assert alternate([start("alone", STEPS + MAIN, uncounted=0)], 3, 1)["alone"] == [
        {"seconds": step} for step in (1.0, 2.0, 3.0)
    ]


def test_closing_lets_a_worker_end_the_processes_that_it_started(start):
    worker = start("other", STEPS + f"\nCHILD = {STEPS!r}" + PARENT)
    worker.turn()
    worker.close(patience=20)
    assert worker.process.returncode == 0  # by itself: its child saw the end of the requests


def test_a_worker_that_does_not_start_is_named_with_its_exit_status(start):
    worker = start("broken", "raise SystemExit(3)")
    with pytest.raises(SystemExit, match="benchmark worker broken ended with exit code 3"):
        _ = worker.hello


def test_the_mean_of_a_turn_is_that_of_its_counted_steps():
    sent = []
    reporter = SimpleNamespace(wait=lambda: None, send=lambda **report: sent.append(report))
    turn = Steps(reporter, 2, 1)
    for seconds in (100.0, 1.0, 3.0):
        turn.wait()
        turn.report(seconds=seconds)
    assert sent == [{"seconds": 2.0}]
