"""Calls of ``asyncio.to_thread`` that never return delay the end of a run for a limited time only."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time

import pytest

from miles_core.run.executor import DaemonExecutor
from miles_testing.toy import toy_arguments

REWARD = """
import asyncio, time

async def reward(args, sample):
    if sample.index == 0:
        await asyncio.to_thread(time.sleep, 600)
    if sample.index >= 4:
        await asyncio.sleep(0.05)  # the other call has begun
        raise ValueError("no judge")
    return 1.0
"""


def test_an_error_ends_a_run_although_a_call_in_a_thread_hangs(tmp_path):
    (tmp_path / "judge.py").write_text(REWARD)
    words = toy_arguments(directory=tmp_path / "run", custom_rm_path=tmp_path / "judge.py")
    code = (
        "import sys; from miles_core.run import executor; executor.PATIENCE = 0.1; from miles_core.cli.main import main; "
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, "train", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "raised ValueError on sample 4: no judge" in done.stderr
    assert "the run ends without waiting for time.sleep, called in a thread, which did not return within 0.1 s" in (
        tmp_path / "run/run.log"
    ).read_text(encoding="utf-8")


def test_results_and_errors_of_calls_are_returned():
    async def main():
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())
        assert await asyncio.gather(*(asyncio.to_thread(pow, n, 2) for n in range(50))) == [n * n for n in range(50)]
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)

    asyncio.run(main())


def test_the_end_waits_for_a_call_that_returns(caplog):
    done = []

    async def main():
        asyncio.get_running_loop().set_default_executor(DaemonExecutor())
        call = asyncio.ensure_future(asyncio.to_thread(lambda: (time.sleep(0.2), done.append(True))))
        await asyncio.sleep(0.05)
        call.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert done and not caplog.records
