"""Requests in flight at an engine's program."""

import asyncio

from miles_workers import inflight
from miles_workers.inflight import Calls


def test_a_request_that_reaches_the_program_after_its_abort_ends_too(monkeypatch):
    monkeypatch.setattr(inflight, "_AGAIN_S", 0.01)
    ended = {number: asyncio.Event() for number in range(3)}
    registered, cancelled = {0, 2}, []

    async def cancel(number):
        cancelled.append(number)
        if number in registered:
            ended[number].set()

    async def request(calls, key, number):
        with calls.add(key, number) as call:
            call.sent = True
            await ended[number].wait()

    async def play():
        calls = Calls(cancel)
        first, late, other = (asyncio.ensure_future(request(calls, 7 + number // 2, number)) for number in range(3))
        await asyncio.sleep(0)
        aborting = asyncio.ensure_future(calls.abort({7}))
        await asyncio.sleep(0.03)
        assert first.done() and not late.done() and not aborting.done()
        registered.add(1)
        await asyncio.wait_for(aborting, 5)
        assert late.done() and not other.done() and cancelled.count(0) == 1 and 2 not in cancelled
        await calls.abort()
        assert other.done() and not calls.any_sent

    asyncio.run(play())
