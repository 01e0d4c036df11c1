"""One program that several engines use."""

import asyncio

import pytest

from miles_workers import EngineLost
from miles_workers.servers import Shared, Use, share


class Program:
    def __init__(self):
        self.calls = []

    async def start(self):
        self.calls.append("start")
        await asyncio.sleep(0)
        return len(self.calls)

    async def stop(self):
        self.calls.append("stop")

    async def restart(self):
        self.calls.append("restart")
        return len(self.calls)


def test_the_first_starts_it_and_the_last_stops_it():
    programs = {}
    first, second = (Use(share(programs, "base", Program), "SGLang") for _ in range(2))
    other = Use(share(programs, "another base", Program), "SGLang")

    async def play():
        assert await asyncio.gather(first.start(), second.start()) == [1, 1]
        await other.start()
        await first.stop()
        await first.stop()
        assert second.link.calls == ["start"]
        await second.stop()
        assert second.link.calls == ["start", "stop"] and other.link.calls == ["start"]
        assert await second.start() == 3

    asyncio.run(play())


def test_one_restart_serves_all_and_the_others_learn_of_it():
    shared = Shared(Program())
    first, second = Use(shared, "SGLang"), Use(shared, "SGLang")

    async def play():
        await first.start()
        await second.start()
        await first.restart(lambda program: program.restart())
        assert first.current() is shared.link
        with pytest.raises(EngineLost, match="SGLang was restarted by another policy's engine, and has no adapter"):
            second.current()
        assert await second.restart(lambda program: program.restart()) == 2
        assert second.current() is shared.link and shared.link.calls == ["start", "restart"]

    asyncio.run(play())
