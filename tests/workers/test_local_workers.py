"""Processes of this machine as workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

from miles_core.errors import DataError, WorkerLost
from miles_workers import uses_cpu
from miles_workers.local_process import process_state
from miles_workers.local_workers import LocalWorkers
from miles_workers.timeouts import Timeouts
from miles_workers.worker import WorkerSpec

KIND = "echo_worker:Echo"
sys.path.insert(0, os.path.dirname(__file__))
Echo = import_module("echo_worker").Echo
sys.path.pop(0)


@pytest.fixture
def workers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    spec = WorkerSpec("", "", str(tmp_path), str(tmp_path))

    def make(policy="policy", **options):
        return LocalWorkers(KIND, ["echo-0", "echo-1"], spec, policy, "info", **options)

    return make


def run(workers, body):
    async def all_of_it():
        try:
            return await body()
        finally:
            await workers.end()

    return asyncio.run(all_of_it())


def test_calls_overlap_errors_are_named_and_a_killed_process_is_lost(workers, tmp_path):
    several = workers()

    async def body():
        await asyncio.gather(several.start(0), several.start(1))
        data = os.urandom(3_000_000)
        slow, quick = several.call(0, Echo.echo, data, 0.2), several.call(0, Echo.echo, 1)
        assert await asyncio.gather(slow, quick) == [("policy", data), ("policy", 1)]
        assert await several.beat(1) == ("other",)
        with pytest.raises(DataError, match=r"^worker echo-0: a bad sample"):
            await several.call(0, Echo.fail)
        pid = several._processes[1].pid
        assert process_state(pid) is not None
        waiting = asyncio.ensure_future(several.call(1, Echo.echo, 2, 60.0))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"worker echo-1 was lost: its process was killed by signal 9 \(SIGKILL\)"):
            await waiting
        with pytest.raises(WorkerLost, match="worker echo-1 was lost: its process was killed"):
            await several.call(1, Echo.echo, 3)
        await several.start(1)
        assert await several.call(1, Echo.echo, 4) == ("policy", 4)
        return several._processes[1].pid

    pid = run(several, body)
    assert process_state(pid) is None
    assert (tmp_path / "workers" / "echo-0.log").exists()


def test_heartbeats_come_while_it_computes_and_a_stopped_process_is_lost(workers):
    several = workers(timeouts=Timeouts(heartbeat=1.0))

    async def body():
        await several.start(0)
        await several.call(0, Echo.compute, 1.5)
        os.kill(several._processes[0].pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="worker echo-0 was lost: it gave no sign of life for 1 s"):
            await several.call(0, Echo.echo, 1)

    run(several, body)


def test_an_error_of_its_constructor_is_the_caller_s(workers):
    several = workers("bad")

    async def body():
        with pytest.raises(DataError, match=r"^worker echo-0: no such policy"):
            await several.start(0)

    run(several, body)


def test_it_ends_with_the_driver(tmp_path):
    """The driver is killed; nothing of the worker is left."""
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from miles_workers.local_workers import LocalWorkers
from miles_workers.worker import WorkerSpec
async def main():
    workers = LocalWorkers({KIND!r}, ["echo-0"], WorkerSpec("", "", {str(tmp_path)!r}, "."), "policy", "info")
    await workers.start(0)
    print(workers._processes[0].pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.kill()
    end = time.monotonic() + 10
    while process_state(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert process_state(pid) is None


def test_a_stopped_process_computes_nothing():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert uses_cpu(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        start = time.monotonic()
        assert not uses_cpu(process.pid) and time.monotonic() - start < 0.5
    finally:
        process.kill()
        process.wait()
    assert not uses_cpu(process.pid)
