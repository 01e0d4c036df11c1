"""A worker without a run, which imports little, so that a process with it starts quickly."""

from __future__ import annotations

import asyncio
import time

from miles_core.errors import DataError


class Echo:
    def __init__(self, spec, policy):
        if policy == "bad":
            raise DataError("no such policy")
        self.policy = policy

    async def answer(self, method, *args):
        found = getattr(self, method)(*args)
        return await found if asyncio.iscoroutine(found) else found

    def beat(self):
        return ("other",)

    async def echo(self, value, seconds=0.0):
        await asyncio.sleep(seconds)
        return self.policy, value

    def compute(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def fail(self):
        raise DataError("a bad sample")

    def close(self):
        pass
