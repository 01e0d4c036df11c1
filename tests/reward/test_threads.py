"""Threads of users' functions: reused, limited, and no obstacle to the exit of the process."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

from miles_core.reward import reward as rewards
from miles_core.reward.threads import DaemonThreads

HANGS = """
import asyncio, time
from miles_core.reward.threads import DaemonThreads
async def run():
    threads = DaemonThreads(2, "reward")
    call = asyncio.ensure_future(threads.call(time.sleep, 600))
    print(await threads.call(lambda: "goes on"))
    call.cancel()
asyncio.run(run())
"""


def test_a_call_that_never_returns_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_threads_are_reused_limited_and_end_with_their_owner():
    running, most, names, lock = 0, 0, set(), threading.Lock()

    def call():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            names.add(threading.current_thread().name)
        time.sleep(0.002)
        with lock:
            running -= 1

    async def run():
        threads = DaemonThreads(3, "limited")
        await asyncio.gather(*(threads.call(call) for _ in range(20)))

    asyncio.run(run())
    assert most == 3 and names == {"limited_1", "limited_2", "limited_3"}
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("limited_"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_reward_that_does_not_return_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(rewards, "SLOW", 0.01)

    async def slow(args, sample):
        await asyncio.sleep(0.1)
        return 1.0

    batch = [SimpleNamespace(index=n, reward=None, response="", label="", tokens=()) for n in (5, 6)]
    reward = rewards.RewardFunction(slow, "mine", "mine.py", "async")
    with caplog.at_level(logging.WARNING):
        asyncio.run(rewards.score(batch, reward, SimpleNamespace(reward_key=None)))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("the reward function mine (mine.py) has not returned after 0.01 s on sample 5; ")
