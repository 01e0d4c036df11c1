"""Requests and answers travel together."""

from __future__ import annotations

import asyncio

from miles_core.contracts.engine import Request, Sampling
from miles_core.errors import DataError, WorkerLost
from miles_workers.mailbox import Mailbox
from miles_workers.timeouts import Timeouts


def request(key):
    return Request([1], Sampling(4), key=key)


async def asked(mailbox, keys):
    return await asyncio.gather(*(mailbox.ask(request(key)) for key in keys), return_exceptions=True)


def test_what_is_asked_and_completed_at_one_moment_travels_at_once(recorded):
    async def main():
        gates = {False: asyncio.Event(), True: asyncio.Event()}

        async def generate(number, request):
            await gates[request.key % 2 == 1].wait()
            return request.key

        workers = recorded(["engine-0"], {"generate": generate})
        mailbox = Mailbox(workers, 0)
        waiting = asyncio.create_task(asked(mailbox, range(8)))
        await asyncio.sleep(0.01)
        assert len(workers.asked("post")) == 1 and workers.busy.open("engine-0") == 8
        for gate in gates.values():
            gate.set()
            await asyncio.sleep(0.01)
        assert await waiting == list(range(8))
        assert len(workers.asked("answers")) == 2 and workers.busy.open("engine-0") == 0
        assert await mailbox.ask(request(9)) == 9  # and it goes on after a pause
        assert len(workers.asked("post")) == 2

    asyncio.run(main())


def test_one_that_fails_fails_alone(recorded):
    async def generate(number, request):
        if request.key == 1:
            raise DataError("too long")
        if request.key == 2:
            raise ZeroDivisionError("of a library")
        return request.key

    async def main():
        first, second, third = await asked(Mailbox(recorded(["engine-0"], {"generate": generate}), 0), range(3))
        assert first == 0 and isinstance(second, DataError)
        # an error that another process may be unable to load is reported with its place
        assert type(third) is RuntimeError and "in generate" in str(third) and "of a library" in str(third)

    asyncio.run(main())


def test_all_hear_that_the_engine_is_lost_and_its_successor_is_asked(recorded):
    async def main():
        workers = recorded(["engine-0"], {"generate": lambda number, request: asyncio.sleep(10)})
        mailbox = Mailbox(workers, 0)
        waiting = asyncio.create_task(asked(mailbox, range(3)))
        await asyncio.sleep(0.01)
        mailbox.close(workers.lost_error(0, "it was killed"))
        assert all(isinstance(found, WorkerLost) for found in await waiting)
        await workers.restart(0)
        workers.answers["generate"] = "done"
        assert await asked(mailbox, range(2)) == ["done", "done"]
        workers.dead = {0}  # the call itself says it
        assert all("engine-0 was lost: it was killed" in str(found) for found in await asked(mailbox, range(2)))

    asyncio.run(main())


def test_an_engine_that_answers_nothing_is_lost_and_a_cancelled_request_disturbs_no_other(recorded):
    async def generate(number, request):
        await asyncio.sleep(request.key)
        return "done"

    async def main():
        workers = recorded(["engine-0"], {"generate": generate}, timeouts=Timeouts(0.05))
        mailbox = Mailbox(workers, 0)
        late, good = await asked(mailbox, [1, 0])
        assert good == "done" and "did not answer 'generate' within 0.05 s" in str(late)
        await workers.start(0)
        given_up = asyncio.create_task(mailbox.ask(request(0.01)))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await mailbox.ask(request(0.02)) == "done"

    asyncio.run(main())


def test_queued_requests_do_not_count_against_an_engine_that_answers(recorded):
    turn = asyncio.Lock()

    async def generate(number, request):
        async with turn:
            await asyncio.sleep(0.03)
            return "done"

    async def main():
        mailbox = Mailbox(recorded(["engine-0"], {"generate": generate}, timeouts=Timeouts(0.2)), 0)
        assert (
            await asked(mailbox, range(20)) == ["done"] * 20
        )  # the last one waits three times as long as a call may take

    asyncio.run(main())
