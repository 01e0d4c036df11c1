"""How fast a path can be, where there is hardly memory to find out."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.data import Encoded
from miles_core.plugin import SyncError
from miles_core.trainer import World
from miles_testing.stored import stored_units
from miles_workers import Workers
from miles_workers.engine_pool import EnginePool
from miles_zero_copy import limits
from miles_zero_copy.paths import Path
from miles_zero_copy.sender import Sender
from miles_zero_copy.slots import MessageSlot
from miles_zero_copy.transport import BucketTransport


@pytest.fixture
def scarce(monkeypatch):
    """A function that leaves so many bytes of memory for a tensor, and what was asked for after it."""
    asked, ones = [], torch.ones

    def leave(nbytes):
        def made(count, **options):
            asked.append(count)
            if count > nbytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ones(count, **options)

        monkeypatch.setattr(torch, "ones", made)
        return asked

    return leave


def test_a_copy_that_there_is_no_memory_for_is_measured_with_less(scarce):
    asked = scarce(9 << 20)
    assert limits.copy_speed() > 0
    assert asked == [64 << 20, 32 << 20, 16 << 20, 8 << 20, 8 << 20]


def test_where_nothing_can_be_measured_weights_arrive_without_a_limit(scarce, engine, checkpoints, caplog):
    scarce(0)
    transport = BucketTransport(engine, World(), 1 << 20)
    report = asyncio.run(transport.send(iter(stored_units(checkpoints[1])), 1))
    transport.close()
    assert engine.version == 1 and set(report.metrics) == {"travelled"}
    assert "cannot measure the speed of a memory copy: cpu does not have 2097152 bytes free" in caplog.text


def test_a_way_whose_own_speed_needs_a_bucket_too_large_is_measured_with_the_one_there_is():
    def make(nbytes):
        if nbytes > 4 << 20:
            raise SyncError("no memory")
        return MessageSlot(nbytes, {})

    got = []

    async def receive(message, last):
        got.append(message["nbytes"])

    async def speed():
        sender = Sender(Path(make, probe=16 << 20, enough=2 << 20), 64 << 20, (0, 1))
        await sender.greet(receive, 0)
        return await sender.speed(receive, 0)

    assert asyncio.run(speed()) > 0 and set(got[1:]) == {5 << 19}


class SentWorkers(Workers):
    """Engines in other processes that answer nothing; counts the messages that were sent to them."""

    count = 0

    async def send(self, number, method, *args):
        self.count += 1

    async def restart(self, number): ...

    async def kill(self, number): ...


def test_a_message_leaves_before_the_next_bucket_is_filled():
    build_info = {"capabilities": frozenset(), "kv_cache_dtype": "", "native_products": False, "model_facts": {}}
    engines = SentWorkers(["engine-0", "engine-1"])
    pool = EnginePool(engines, build_info)
    path = Path(lambda nbytes: MessageSlot(nbytes, {}), ahead=1)
    sender = Sender(path, 1 << 20, (0, 1))

    async def receive(message, last):
        await pool.receive(message, 0, last)

    def units():
        for number in range(3):
            yield Encoded("w", {"w": torch.zeros(1 << 20, dtype=torch.uint8)})
            assert engines.count == 2 * (number + 1)

    asyncio.run(sender.send(units(), receive, 0))
    assert engines.count == 8  # with the end of the version


def test_colocated_engines_get_no_broadcast():
    """NCCL refuses a group with two members on one GPU (seen on two H100s with two ranks and two engines)."""
    from miles_zero_copy.paths import paths

    gpu = torch.device("cuda", 0)
    assert "a broadcast (NCCL)" in paths(gpu, 2) and "a broadcast (NCCL)" not in paths(gpu, 2, colocated=True)
    assert [*paths(gpu, 2, colocated=True)] == [
        "GPU memory by handle",
        "shared memory",
        "messages over the runtime's channel",
    ]
