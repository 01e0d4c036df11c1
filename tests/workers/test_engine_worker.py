"""What an engine's process does with pushes that break off."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_workers.engine_worker import EngineWorker
from miles_workers.transport import Arrival, Arrivals
from miles_workers.weight_block import WeightBlock

RANKS = ("trainer-0", "trainer-1")


class Engine:
    """Remembers what it was given."""

    def __init__(self):
        self.weights, self.version, self.gate = {}, -1, None

    async def update_weights(self, units, version):
        if self.gate is not None:
            await self.gate.wait()
        self.weights = {unit.name: unit.parts[unit.name].tolist() for unit in units}
        self.version = version

    async def receive(self, message, version, last):
        self.version = version


@pytest.fixture
def worker():
    made = object.__new__(EngineWorker)
    made._begin_empty()
    made.part = Engine()
    return made


def block(name, value):
    packed = WeightBlock(64)
    assert packed.add(Encoded(name, {name: torch.tensor([value])}))
    return packed.table, packed.data()


async def send(worker, push, rank, version, names):
    for number, name in enumerate(names):
        await worker.take(push, rank, 2, number, version, *block(name, version))
    await worker.update(push, version, rank, 2, len(names))


def test_a_rank_that_dies_in_its_push_leaves_nothing_for_the_next_one(worker):
    async def main():
        await worker.begin_push(1, RANKS)
        waiting = asyncio.create_task(send(worker, 1, 1, 4, "b"))  # complete; the other rank dies before it is
        await worker.take(1, 0, 2, 0, 4, *block("a", 4))
        await asyncio.sleep(0)
        assert worker.beat() == ("trainer-0",)
        await worker.begin_push(2, RANKS)
        with pytest.raises(SyncError, match="given up"):
            await waiting
        first = asyncio.create_task(send(worker, 2, 0, 6, "a"))
        await asyncio.sleep(0.01)
        assert worker.part.version == -1 and not first.done()  # rank 1 has sent nothing of this push
        await asyncio.gather(first, send(worker, 2, 1, 6, "b"))
        assert worker.part.weights == {"a": [6], "b": [6]} and worker.part.version == 6

    asyncio.run(main())


def test_what_arrives_late_of_a_push_that_was_given_up_is_refused(worker):
    async def main():
        await worker.begin_push(1, RANKS)
        await worker.begin_push(2, RANKS)
        with pytest.raises(SyncError, match="push 1 of the weights was given up: this engine takes push 2"):
            await worker.take(1, 0, 2, 0, 4, *block("a", 4))
        with pytest.raises(SyncError, match="push 1"):
            await worker.update(1, 4, 0, 2, 0)
        with pytest.raises(SyncError, match="push 1"):
            await worker.receive(1, {}, 4, True)
        assert worker.part.version == -1

    asyncio.run(main())


def test_a_push_waits_for_the_installation_of_the_one_before(worker):
    async def main():
        await worker.begin_push(1, RANKS)
        worker.part.gate = asyncio.Event()
        calls = [asyncio.create_task(send(worker, 1, rank, 4, "ab"[rank])) for rank in range(2)]
        await asyncio.sleep(0.01)
        following = asyncio.create_task(worker.begin_push(2, RANKS))
        await asyncio.sleep(0.01)
        assert not following.done()
        worker.part.gate.set()
        await following
        assert worker.part.weights == {"a": [4], "b": [4]}
        assert all(isinstance(error, SyncError) for error in await asyncio.gather(*calls, return_exceptions=True))

    asyncio.run(main())


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (0, 0)])
def test_a_bucket_that_did_not_come_is_noticed(worker, numbers):
    async def main():
        await worker.begin_push(1, RANKS)
        with pytest.raises(SyncError, match="a message was lost"):
            for number in numbers:
                await worker.take(1, 0, 2, number, 1, *block("a", 1))

    asyncio.run(main())


def test_ranks_that_send_different_versions_install_nothing(worker):
    async def main():
        await worker.begin_push(1, RANKS)
        calls = [send(worker, 1, 0, 4, "a"), send(worker, 1, 1, 5, "b")]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all("different versions" in str(error) for error in found) and worker.part.version == -1

    asyncio.run(main())


class Streaming(Engine):
    """Loads buckets as they arrive, through the arrivals of the transport ``buckets``."""

    def __init__(self):
        super().__init__()
        self.held, self.arrivals = 0, Arrivals(lambda version, staged: _Loaded(self, version))

    async def receive(self, message, version, last):
        await self.arrivals.receive(message, version, last)


class _Loaded(Arrival):
    def __init__(self, engine, version):
        self.engine, self.version, self.found = engine, version, {}

    async def take(self, units):
        self.found |= {unit.name: unit.parts[unit.name].tolist() for unit in units}

    async def finish(self):
        self.engine.weights, self.engine.version = self.found, self.version


@pytest.fixture
def streaming(worker):
    worker.part, worker._streams = Streaming(), True
    return worker


def test_an_engine_that_streams_holds_no_buckets(streaming):
    async def main():
        await streaming.begin_push(1, RANKS)
        first = asyncio.create_task(send(streaming, 1, 0, 4, "abc"))
        await asyncio.sleep(0.01)
        assert not streaming._blocks and streaming.part.version == -1 and not first.done()
        await asyncio.gather(first, send(streaming, 1, 1, 4, ""))  # a rank without buckets
        assert streaming.part.weights == {"a": [4], "b": [4], "c": [4]} and streaming.part.version == 4

    asyncio.run(main())


def test_a_push_that_breaks_off_leaves_nothing_for_the_next_one_in_an_engine_that_streams(streaming):
    async def main():
        await streaming.begin_push(1, RANKS)
        waiting = asyncio.create_task(send(streaming, 1, 1, 4, "xy"))
        await asyncio.sleep(0.01)
        await streaming.begin_push(2, RANKS)
        with pytest.raises(SyncError, match="given up"):
            await waiting
        await asyncio.gather(send(streaming, 2, 0, 4, "a"), send(streaming, 2, 1, 4, "b"))
        assert streaming.part.weights == {"a": [4], "b": [4]}  # the same version, and nothing of the first push

    asyncio.run(main())
