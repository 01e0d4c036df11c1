"""The driver's side of one rollout worker: calls of engines, cancelled requests, and the loss of the worker."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.sample import Sample
from miles_core.errors import WorkerLost
from miles_workers.object_ref import ObjectRef
from miles_workers.remote_sample import heads, pack_samples, refer
from miles_workers.rollout_pool import _Line
from miles_workers.rollout_worker import EngineCall, GroupOrder, Letters, News
from miles_workers.workers import Workers


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

    async def restart(self, number):
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
        pool = SimpleNamespace(run=run, workers=workers, engines={"policy": engine}, direct={}, answers={})
        line = _Line(pool, 0, "rollout-0-0", lambda *found: losses.append(found))
        group = asyncio.ensure_future(line.produce(GroupOrder(ObjectRef([]), (0,), False)))
        dropped = asyncio.ensure_future(line.produce(GroupOrder(ObjectRef([]), (1,), False)))
        await asyncio.sleep(0.01)
        (method, packed), *_ = workers.calls
        letters = Letters.unpack(packed)
        assert (method, letters.step, letters.policies, [*letters.groups]) == ("post", 5, {"policy": (3, 2)}, [0, 1])

        workers.news.put_nowait(News(calls={n: generate(n) for n in range(4)}, answers={"engine/x": (1.0, 2.0)}))
        await asyncio.sleep(0.01)
        assert engine.started == [0, 1, 2, 3] and pool.answers == {"engine/x": (1.0, 2.0)}
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


def test_messages_arrive_as_they_were_sent():
    ref = ObjectRef([])
    groups = {
        3: GroupOrder(17, range(8, 16), False),
        4: GroupOrder(ref, range(16, 24), True),
        9: GroupOrder(12, [5, 9, 2], False),
    }
    letters = Letters(2, {"policy": (3, 2)}, groups, {1: (None, WorkerLost("engine-0", "it was killed"))})
    found = Letters.unpack(letters.pack())
    assert (found.step, found.policies, found.answers, found.engines) == (2, {"policy": (3, 2)}, letters.answers, {})
    orders = {ticket: (o.samples, [*o.indexes], o.evaluation) for ticket, o in found.groups.items()}
    assert orders == {ticket: (o.samples, [*o.indexes], o.evaluation) for ticket, o in groups.items()}
    assert Letters.unpack(Letters(1, {}).pack()) == Letters(1, {})

    made = [
        [Sample(tokens=[1, 2], reward=float(n), group_index=n, index=2 * n + i) for i in range(2)] for n in range(3)
    ]
    news = News(groups={n: ((heads(group), n), None) for n, group in enumerate(made)}, busy=[("engine-0", 1)])
    news.groups[7] = None, WorkerLost("engine-0", "it was killed")
    received = News.unpack(pickle.loads(pickle.dumps(news.pack())))
    assert received.busy == news.busy and received.calls == {} and received.groups[7][0] is None
    for n, group in enumerate(made):
        (sent, position), error = received.groups[n]
        assert position == n and error is None
        assert refer(sent, pack_samples(group)) == group
    one, other = (refer(received.groups[n][0][0], pack_samples(made[n]))[0] for n in range(2))
    one.weight_versions.append((0, 1))
    assert other.weight_versions == []
