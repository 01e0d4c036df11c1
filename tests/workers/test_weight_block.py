"""Blocks of weights: what is packed is read, and memory is reused only where the receiver has its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_workers.weight_block import ALIGNMENT, BlockSender, WeightBlock, read_block, room_of

WEIGHTS = [
    Encoded("a", {"a": torch.randn(5, 3).to(torch.bfloat16)}),
    Encoded("b", {"b": torch.randn(4, 6).T}),
    Encoded("c", {"c": torch.randn(8).to(torch.float8_e4m3fn), "c_scale": torch.randn(())}, "fp8"),
    Encoded("empty", {"empty": torch.zeros(0, 7)}),
    Encoded("d", {"d": torch.tensor([True, False, True])}),
]


def same(found, wanted):
    assert [(unit.name, unit.format, [*unit.parts]) for unit in found] == [
        (unit.name, unit.format, [*unit.parts]) for unit in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        for name, tensor in one.parts.items():
            was = other.parts[name]
            assert (tensor.dtype, tensor.shape) == (was.dtype, was.shape)
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), was.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("shift", [0, 1, 16])
@pytest.mark.parametrize("writable", [True, False])
def test_a_block_is_read_in_any_memory(shift, writable):
    block = WeightBlock(sum(map(room_of, WEIGHTS)))
    assert all(block.add(unit) for unit in WEIGHTS)
    assert not block.add(WEIGHTS[0])
    packed = block.data()
    memory = np.empty(len(packed) + ALIGNMENT, np.uint8)
    start = (shift - memory.ctypes.data) % ALIGNMENT
    data = memory[start : start + len(packed)]
    data[:] = packed
    data.flags.writeable = writable
    read = list(read_block(block.table, data))
    same(read, WEIGHTS)
    starts = [t.data_ptr() for unit in read for t in unit.parts.values() if t.numel()]
    assert all(at % ALIGNMENT == 0 for at in starts)


@pytest.mark.parametrize("copies", [True, False])
def test_memory_is_reused_only_if_the_receiver_has_a_copy(copies):
    taken, places = [], set()

    async def take(number, table, data, version):
        taken.append((number, version, table, data))

    def share(data):
        places.add(data.ctypes.data)
        return data.copy() if copies else data

    units = [Encoded(str(n), {str(n): torch.full((16,), float(n))}) for n in range(6)]
    sender = BlockSender(2 * ALIGNMENT, share, take)
    assert asyncio.run(sender.send(iter(units), 4)) == 3
    assert asyncio.run(sender.send(iter(units), 5)) == 3
    assert [call[:2] for call in taken] == [(n, version) for version in (4, 5) for n in range(3)]
    same([unit for _, _, table, data in taken for unit in read_block(table, data)], units * 2)
    assert len(places) == (1 if copies else 6)


def test_a_large_weight_has_a_block_of_its_own():
    sizes = []

    async def take(number, table, data, version):
        sizes.append((len(table), len(data)))

    units = [Encoded(str(n), {str(n): torch.zeros(n, dtype=torch.uint8)}) for n in (64, 640, 64, 64)]
    asyncio.run(BlockSender(128, bytes, take).send(units, 0))
    assert sizes == [(1, 64), (1, 640), (2, 128)]


def test_the_first_error_is_raised_after_the_stream_was_read():
    seen, taken = [], []

    async def take(number, table, data, version):
        taken.append(number)
        if number == 1:
            raise SyncError("lost")

    def units():
        for n in range(5):
            seen.append(n)
            yield Encoded("w", {"w": torch.zeros(16)})

    with pytest.raises(SyncError, match="lost"):
        asyncio.run(BlockSender(64, bytes, take).send(units(), 0))
    assert seen == [0, 1, 2, 3, 4] and taken == [0, 1]


def test_a_stream_that_breaks_off_leaves_no_call_behind():
    async def main():
        ended = []

        async def take(number, table, data, version):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        def units():
            yield WEIGHTS[0]
            yield WEIGHTS[0]
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await BlockSender(64, bytes, take).send(units(), 0)
        await asyncio.sleep(0)
        assert ended == [0]

    asyncio.run(main())
