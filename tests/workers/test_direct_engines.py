"""Requests that a rollout worker sends straight to engines."""

from __future__ import annotations

import asyncio

import pytest

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.errors import WorkerLost
from miles_workers.busy_time import BusyTime
from miles_workers.direct_engines import DirectEngines, EngineState, LostEngine, ReportedBusyTime
from miles_workers.engine_pool import EnginePool
from miles_workers.inbox import Inbox
from miles_workers.timeouts import Timeouts

NAMES = ["engine-0", "engine-1", "engine-2", "engine-3"]


def request(key, group=0):
    return Request([1], Sampling(4), key=key, group=group)


@pytest.fixture
def connect(recorded, build_info):
    """``connect(place, answers, **options)``: the engines of one worker, its reports, and the recorded calls."""

    def call(place=(0, 1), generate=lambda number, request: number, timeouts=None, busy=None):
        workers, reports = recorded(NAMES, {"generate": generate}), []
        engines = DirectEngines(
            "policy",
            workers,
            build_info,
            "rollout-0-0",
            place,
            timeouts or Timeouts(),
            busy or BusyTime(),
            reports.append,
        )
        return engines, reports, workers

    return call


def state(workers, serving=(0, 1, 2, 3), replaced=None):
    return EngineState(workers, frozenset(serving), replaced or {})


def test_requests_wait_until_the_driver_names_engines(connect):
    async def body():
        engines, _, workers = connect()
        waiting = asyncio.ensure_future(engines.generate(request(1)))
        await asyncio.sleep(0.01)
        assert not waiting.done() and not workers.calls
        engines.update(state(workers, [2]))
        assert await waiting == 2
        (post,) = workers.asked("post")
        assert post[2] == "rollout-0-0"

    asyncio.run(body())


def test_workers_begin_with_other_engines(connect):
    async def body(number):
        engines, _, workers = connect((number, 2))
        engines.update(state(workers))
        return [await asyncio.gather(*(engines.generate(request(n, group=n)) for n in range(6)))]

    assert [asyncio.run(body(number)) for number in range(2)] == [[[0, 1, 2, 3, 0, 1]], [[2, 3, 0, 1, 2, 3]]]


def test_a_lost_engine_is_reported_once_and_its_requests_go_to_others(connect):
    async def body():
        engines, reports, workers = connect()
        engines.update(state(workers))
        workers.dead.add(0)
        assert await asyncio.gather(*(engines.generate(request(n)) for n in range(3))) == [1, 1, 1]
        assert reports == [LostEngine("policy", 0, 0, "it was killed")]
        engines.update(state(workers))  # sent before the driver knew
        assert await engines.generate(request(5)) == 1
        workers.dead.discard(0)
        workers.lost.clear()
        engines.update(state(workers, replaced={0: 1}))
        assert {await engines.generate(request(n, group=n)) for n in range(9)} >= {0}
        workers.dead |= {0, 1, 2, 3}
        waiting = asyncio.ensure_future(engines.generate(request(7)))
        await asyncio.sleep(0.02)
        assert not waiting.done() and reports[1:] == [
            LostEngine("policy", n, int(n == 0), "it was killed") for n in range(4)
        ]
        waiting.cancel()
        with pytest.raises(WorkerLost, match="trainer-0"):
            engines.replace_lost(WorkerLost("trainer-0", "it was killed"))

    asyncio.run(body())


def test_requests_at_an_engine_that_was_replaced_are_sent_again(connect):
    async def body():
        never = asyncio.Event()

        async def generate(number, request):
            if number == 0:
                await never.wait()
            return number

        engines, reports, workers = connect(generate=generate)
        engines.update(state(workers))
        waiting = asyncio.ensure_future(engines.generate(request(1)))
        await asyncio.sleep(0.01)
        engines.update(state(workers, [1, 2, 3], replaced={0: 1}))
        assert await waiting == 1 and not reports

    asyncio.run(body())


def test_an_engine_that_does_not_answer_is_lost(connect):
    async def body():
        async def generate(number, request):
            if number == 0:
                await asyncio.Event().wait()
            return number

        engines, reports, workers = connect(generate=generate, timeouts=Timeouts(0.1))
        engines.update(state(workers))
        assert await engines.generate(request(1)) == 1
        assert reports == [LostEngine("policy", 0, 0, "it did not answer 'generate' within 0.1 s")]

    asyncio.run(body())


def test_aborts_go_to_the_engines_with_the_requests(connect):
    async def body():
        async def generate(number, request):
            await asyncio.Event().wait()

        engines, _, workers = connect(generate=generate)
        engines.update(state(workers))
        tasks = [asyncio.ensure_future(engines.generate(request(n, group=n))) for n in range(3)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engines.abort([0, 2, 9])
        assert workers.asked("abort") == [(0, "abort", [0]), (2, "abort", [2])]

    asyncio.run(body())


def test_the_driver_learns_when_engines_are_busy():
    changes = []
    busy = ReportedBusyTime(lambda name, change: changes.append((name, change)))
    with busy.at("a"):
        with busy.at("a"), busy.at("b"):
            pass
        assert changes == [("a", 1), ("b", 1), ("b", -1)]
    assert changes[3:] == [("a", -1)] and busy.open("a") == 0


def test_reports_of_workers_replace_an_engine_once(recorded, build_info):
    async def body():
        workers, replaced, changes = recorded(NAMES), [], []
        pool = EnginePool(workers, build_info)

        async def replace(number, lost):
            replaced.append((number, lost.cause))
            await workers.start(number)

        pool.replace_with(replace, lambda: None)
        pool.watchers.append(lambda: changes.append(sorted(pool.serving)))
        await asyncio.gather(*(pool.report_lost(1, 0, "it was killed") for _ in range(3)))
        await pool.whole()
        assert replaced == [(1, "it was killed")] and changes[0] == [0, 2, 3]
        await pool.report_lost(1, 0, "an old report")
        await pool.whole()
        assert len(replaced) == 1 and EngineState.of(pool).replaced == {1: 1}
        await pool.forget("rollout-0-0")
        assert len(workers.asked("forget")) == 4

    asyncio.run(body())


def test_an_engine_that_cannot_be_replaced_fails_the_groups(recorded, build_info):
    async def body():
        pool, failures = EnginePool(recorded(NAMES), build_info), []

        async def replace(number, lost):
            raise lost

        pool.replace_with(replace, lambda: None)
        pool.watchers.append(lambda: failures.append(pool.failure))
        await pool.report_lost(1, 0, "it was killed")
        await asyncio.sleep(0.02)
        assert failures[0] is None and isinstance(failures[-1], WorkerLost)

    asyncio.run(body())


def test_requests_of_a_client_that_ended_are_dropped():
    async def body():
        async def generate(request):
            await asyncio.sleep(request.key)
            return Response([1], [-1.0], "stop")

        inbox = Inbox(generate)
        inbox.post({1: request(0), 2: request(60), 3: request(70)})
        assert [*await inbox.answers()] == [1]
        waiting = asyncio.ensure_future(inbox.answers())
        await asyncio.sleep(0)
        assert sorted(inbox.close()) == [60, 70]
        assert await asyncio.wait_for(waiting, 5) == {}

    asyncio.run(body())
