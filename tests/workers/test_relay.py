"""Pushes of many senders to many engines through the relay of the first engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.data.world import World
from miles_core.errors import SyncError, WorkerLost
from miles_workers import relay
from miles_workers.engine_pool import EnginePool
from miles_workers.engine_worker import EngineWorker
from miles_workers.workers import Workers

SENDERS, ENGINES = 12, 6


class Engine:
    """Keeps the weights that it was given."""

    version = -1

    async def update_weights(self, units, version):
        self.weights = {unit.name: unit.parts[unit.name].tolist() for unit in units}
        self.version = version


class Here(Workers):
    """Engine workers in this process; counts the messages to each."""

    def __init__(self, count):
        super().__init__([f"engine-{number}" for number in range(count)])
        self.workers, self.messages, self.dead = [], [0] * count, set()
        for _ in range(count):
            worker = object.__new__(EngineWorker)
            worker._begin_empty()
            worker.part = Engine()
            self.workers.append(worker)

    async def send(self, number, method, *args):
        self.messages[number] += 1
        await asyncio.sleep(0)
        if number in self.dead:
            raise self.lost_error(number, "it was killed")
        return await self.workers[number].answer(method, *args)

    async def restart(self, number):
        raise NotImplementedError

    async def kill(self, number):
        self.dead.add(number)


def units(rank, count=3):
    return [Encoded(f"{rank}.{n}", {f"{rank}.{n}": torch.tensor([rank * 100 + n])}) for n in range(count)]


async def push(engines, build_info, number=1, version=5, senders=SENDERS, count=3, alive=None):
    for at, worker in enumerate(engines.workers):
        if at not in engines.dead:
            await worker.begin_push(number, [f"trainer-{n}" for n in range(senders)])
    engines.workers[0].connect(engines)
    pools = [EnginePool(engines, build_info, 1, World(rank, senders)) for rank in range(senders)]
    for pool in pools:
        pool.push = number
    work = [pool.update_weights(units(pool.world.rank, count), version) for pool in pools[: alive or senders]]
    return await asyncio.gather(*work, return_exceptions=True)


def test_every_engine_gets_all_weights_with_senders_plus_engines_messages(build_info):
    engines = Here(ENGINES)
    assert asyncio.run(push(engines, build_info)) == [None] * SENDERS
    wanted = {unit.name: unit.parts[unit.name].tolist() for rank in range(SENDERS) for unit in units(rank)}
    assert all(worker.part.weights == wanted and worker.part.version == 5 for worker in engines.workers)
    rounds = 3 + 1  # buckets, and the completion
    assert sum(engines.messages) == rounds * (SENDERS + ENGINES)
    direct = rounds * SENDERS * ENGINES
    assert sum(engines.messages) < direct / 3


def test_few_senders_call_directly(build_info):
    engines = Here(2)
    assert asyncio.run(push(engines, build_info, senders=2)) == [None] * 2
    assert engines.messages == [2 * 4] * 2


def test_senders_with_unequal_numbers_of_buckets_do_not_wait_for_each_other(build_info, monkeypatch):
    monkeypatch.setattr(relay, "WINDOW", 0.001)

    async def main():
        engines = Here(ENGINES)
        for worker in engines.workers:
            await worker.begin_push(1, ())
        engines.workers[0].connect(engines)
        pools = [EnginePool(engines, build_info, 1, World(rank, SENDERS)) for rank in range(SENDERS)]
        for pool in pools:
            pool.push = 1
        await asyncio.gather(*(f.update_weights(units(f.world.rank, 1 + f.world.rank), 5) for f in pools))
        return engines

    engines = asyncio.run(main())
    assert all(len(w.part.weights) == sum(range(1, SENDERS + 1)) for w in engines.workers)


def test_a_lost_engine_ends_the_push_of_every_sender(build_info):
    engines = Here(ENGINES)
    engines.dead.add(4)
    found = asyncio.run(push(engines, build_info))
    assert all(isinstance(error, WorkerLost) and error.worker == "engine-4" for error in found)


def test_a_push_that_was_given_up_fails_and_leaves_nothing_for_the_next(build_info):
    async def main():
        engines = Here(ENGINES)
        first = asyncio.ensure_future(push(engines, build_info, alive=SENDERS - 1))  # one sender never calls
        await asyncio.sleep(10 * relay.WINDOW)
        assert not first.done()
        second = await push(engines, build_info, number=2, version=6)
        return engines, await first, second

    engines, first, second = asyncio.run(main())
    assert all(isinstance(error, SyncError) for error in first)
    assert second == [None] * SENDERS and all(worker.part.version == 6 for worker in engines.workers)


def test_an_error_reaches_the_sender_that_made_the_call(build_info):
    async def main():
        engines = Here(ENGINES)
        for worker in engines.workers:
            await worker.begin_push(1, ())
        engines.workers[0].connect(engines)
        calls = [
            engines.call(
                0,
                EngineWorker.relay,
                1,
                SENDERS,
                "take",
                (rank, SENDERS, int(rank == 3), 5, []),
                (np.empty(0, np.uint8),),
            )
            for rank in range(SENDERS)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(main())
    assert isinstance(found[3], SyncError) and "a message was lost" in str(found[3])
    assert [error for rank, error in enumerate(found) if rank != 3] == [None] * (SENDERS - 1)


@pytest.mark.parametrize(
    ("senders", "engines", "relayed"), [(1, 256, False), (256, 1, False), (2, 2, False), (8, 8, True)]
)
def test_which_pushes_are_relayed(senders, engines, relayed):
    assert relay.is_relayed(senders, engines) is relayed
