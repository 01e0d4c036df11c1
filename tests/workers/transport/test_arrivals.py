"""Buckets of several ranks in one engine: a rank that tries another kind of memory does not disturb the others."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.errors import SyncError
from miles_workers.transport import Arrival, Arrivals


class Loaded(Arrival):
    """Keeps the tensors of a version."""

    def __init__(self, served, version):
        self.served, self.version, self.found = served, version, {}

    async def take(self, units):
        for unit in units:
            assert unit.name not in self.found
            self.found[unit.name] = unit.parts[unit.name].tolist()

    async def finish(self):
        self.served[self.version] = self.found


@pytest.fixture
def served():
    return {}


@pytest.fixture
def arrivals(served):
    return Arrivals(lambda version, staged: Loaded(served, version))


def message(rank, number, *names, push=1, ranks=2):
    units = iter([Encoded(name, {name: torch.tensor([rank])}) for name in names])
    return {"sender": (rank, ranks), "number": number, "push": push, "memory": {"kind": "units", "units": units}}


def unreadable(rank, number, push=1):
    """A bucket in memory of another host."""
    where = {"kind": "file", "key": f"gone-{rank}", "path": "/dev/shm/no-such-segment"}
    return {**message(rank, number, push=push), "memory": where}


def test_a_rank_whose_first_kind_of_memory_fails_leaves_the_buckets_of_the_other(arrivals, served):
    async def main():
        await arrivals.receive(message(1, 0), 5, False)  # the other rank's empty bucket
        await arrivals.receive(message(1, 1, "b"), 5, False)
        with pytest.raises(SyncError, match="cannot open /dev/shm/no-such-segment"):
            await arrivals.receive(unreadable(0, 0), 5, False)
        await arrivals.receive(message(1, 2, "c"), 5, True)
        await arrivals.receive(message(0, 0), 5, False)  # another kind of memory
        await arrivals.receive(message(0, 1, "a"), 5, True)

    asyncio.run(main())
    assert served == {5: {"a": [0], "b": [1], "c": [1]}}


def test_a_rank_that_starts_again_before_its_first_tensor_leaves_the_buckets_of_the_other(arrivals, served):
    """Its first kind of memory worked for this engine and failed for another one."""

    async def main():
        await arrivals.receive(message(0, 0), 5, False)
        await arrivals.receive(message(1, 0, "b"), 5, False)
        await arrivals.receive(message(0, 0), 5, False)
        await arrivals.receive(message(1, 1, "c"), 5, True)
        await arrivals.receive(message(0, 1, "a"), 5, True)

    asyncio.run(main())
    assert served == {5: {"a": [0], "b": [1], "c": [1]}}


def test_a_failure_after_tensors_were_loaded_drops_the_version(arrivals, served):
    async def main():
        await arrivals.receive(message(1, 0, "b"), 5, False)
        await arrivals.receive(message(0, 0, "a"), 5, False)
        with pytest.raises(SyncError, match="bucket 7 of version 5 arrived, but bucket 1 was expected"):
            await arrivals.receive(message(0, 7, "c"), 5, False)
        with pytest.raises(SyncError, match="bucket 1 of version 5 arrived, but bucket 0 was expected"):
            await arrivals.receive(message(1, 1), 5, True)
        for rank, name in enumerate("ab"):  # the next push
            await arrivals.receive(message(rank, 0, name, push=2), 5, True)

    asyncio.run(main())
    assert served == {5: {"a": [0], "b": [1]}}


def test_the_next_push_does_not_continue_one_whose_first_bucket_failed(arrivals, served):
    async def main():
        await arrivals.receive(message(1, 0, "old"), 5, False)
        with pytest.raises(SyncError):
            await arrivals.receive(unreadable(0, 0), 5, False)
        for rank, name in enumerate("ab"):
            await arrivals.receive(message(rank, 0, name, push=2), 5, True)

    asyncio.run(main())
    assert served == {5: {"a": [0], "b": [1]}}
