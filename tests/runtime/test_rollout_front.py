"""The driver's side of one rollout worker: calls of engines, cancelled requests, and the loss of the worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.errors import WorkerLost
from miles_runtime.blob import Blob
from miles_runtime.rollout_front import _Line
from miles_runtime.rollout_worker import EngineCall, GroupOrder, Letters, News
from miles_runtime.workers import Workers


class Scripted(Workers):
    """Delivers the news that a test puts into its queue, and records all other calls."""

    def __init__(self):
        super().__init__(["rollout-0"])
        self.news, self.calls = asyncio.Queue(), []

    async def send(self, number, method, *args):
        if method == "news":
            found = await self.news.get()
            if isinstance(found, Exception):
                raise found
            return found.pack(), []
        self.calls.append((method, *args))

    async def renew(self, number):
        pass

    async def kill(self, number):
        pass


class SlowEngine:
    """Answers the key 0 at once, and others never."""

    def __init__(self):
        self.started, self.cancelled, self.aborted = [], [], []

    async def generate(self, request):
        self.started.append(request.key)
        try:
            if request.key:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.key)
            raise
        return Response([1], [-1.0], "stop")

    async def abort(self, keys=None):
        self.aborted += keys


def generate(key):
    return EngineCall("policy", "generate", Request([1], Sampling(4), key=key))


def test_requests_of_a_worker_are_answered_cancelled_and_aborted():
    async def body():
        workers, engine, losses = Scripted(), SlowEngine(), []
        policy = SimpleNamespace(name="policy", version=3, trained=2)
        run = SimpleNamespace(step=5, policies=[policy])
        front = SimpleNamespace(run=run, workers=workers, engines={"policy": engine}, direct={}, answers={})
        line = _Line(front, 0, "rollout-0-0", lambda *found: losses.append(found))
        group = asyncio.ensure_future(line.produce(GroupOrder(Blob([]), (0,), False)))
        dropped = asyncio.ensure_future(line.produce(GroupOrder(Blob([]), (1,), False)))
        await asyncio.sleep(0.01)
        (method, packed), *_ = workers.calls
        letters = Letters.unpack(packed)
        assert (method, letters.step, letters.policies, [*letters.groups]) == ("post", 5, {"policy": (3, 2)}, [0, 1])

        workers.news.put_nowait(News(calls={n: generate(n) for n in range(4)}, answers={"engine/x": (1.0, 2.0)}))
        await asyncio.sleep(0.01)
        assert engine.started == [0, 1, 2, 3] and front.answers == {"engine/x": (1.0, 2.0)}
        ((value, error),) = Letters.unpack(workers.calls[1][1]).answers.values()
        assert Letters.unpack(workers.calls[1][1]).policies == {}, "sent once"
        assert value.tokens == [1] and error is None

        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        await line.dropped()
        assert workers.calls[-1] == ("drop", {1})
        workers.news.put_nowait(News(cancelled=[1, 2], calls={4: EngineCall("policy", "abort", [1])}))
        await asyncio.sleep(0.01)
        assert engine.cancelled == [1, 2] and engine.aborted == [1]

        workers.news.put_nowait(WorkerLost("rollout-0", "it was killed"))
        await asyncio.sleep(0.01)
        assert engine.cancelled == [1, 2, 3]
        assert engine.aborted == [1, 2, 3], "also a cancelled request that the worker could not abort any more"
        (failed,) = await asyncio.gather(group, return_exceptions=True)
        assert isinstance(failed, WorkerLost)
        assert [number for number, _ in losses] == [0]

    asyncio.run(body())
