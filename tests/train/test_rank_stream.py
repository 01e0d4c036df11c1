"""Which tensors a rank sends again as the same objects."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.contracts.transport import SyncReport
from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec


class Transport:
    """Keeps what it is given."""

    staging = shares = False

    def __init__(self):
        self.sent = []

    def reserve(self, name, stored):
        return None

    async def send(self, units, version):
        self.sent.append(list(units))
        return SyncReport(version, 0, len(self.sent[-1]), 0.0)

    def close(self):
        """Nothing to release."""


@pytest.fixture
def rank(toy_run):
    found = toy_run(steps=1).parts[0].learner.rank
    found._transport, found._sent, found._engine = Transport(), None, None
    return found


def push(rank, version):
    asyncio.run(rank.push(version))
    return rank.transport.sent[-1]


def same(first, second):
    return len(first) == len(second) > 0 and all(a is b for a, b in zip(first, second, strict=True))


def test_the_same_memory_is_sent_as_the_same_objects(rank):
    first = push(rank, 1)
    with torch.no_grad():
        next(rank.trainer.model.parameters()).add_(1)
    assert same(first, push(rank, 2))


@pytest.mark.parametrize("change", ["memory", "codec", "unknown memory"])
def test_other_memory_is_encoded_again(rank, change, monkeypatch):
    first = push(rank, 1)
    if change == "memory":
        parameter = next(rank.trainer.model.parameters())
        parameter.data = parameter.data.clone()
    elif change == "codec":
        rank.codec = type("Other", (Codec,), {})()
    else:
        monkeypatch.setattr(type(rank.trainer), "find_memory", lambda self: None)
    second = push(rank, 2)
    assert not same(first, second) and [a.name for a in first] == [b.name for b in second]
    values = dict(rank.trainer.model.state_dict())
    assert all(torch.equal(each.parts[each.name], values[each.name]) for each in second if each.name in values)


def test_a_plugin_sees_every_sync(rank, monkeypatch):
    seen = []

    def wrap(units):
        def wrapped():
            for unit in units():
                seen.append(unit)
                yield unit

        return wrapped

    monkeypatch.setattr(rank, "weight_wrappers", lambda purpose: [wrap])
    push(rank, 1)
    count = len(seen)
    push(rank, 2)
    assert len(seen) == 2 * count > 0


def test_tensors_that_pass_are_not_kept(rank, monkeypatch):
    def units(everywhere=False):
        yield WeightUnit({"a": torch.zeros(2)}, lasting=True)
        yield WeightUnit({"b": torch.zeros(2)}, lasting=False)

    monkeypatch.setattr(rank.trainer, "units", units)
    assert not same(push(rank, 1), push(rank, 2))


def test_a_stream_that_broke_off_is_not_kept(rank):
    class Broken(Transport):
        async def send(self, units, version):
            self.sent.append([next(units)])
            return SyncReport(version, 0, 1, 0.0)

    rank._transport = Broken()
    push(rank, 1)
    rank._transport = Transport()
    units = push(rank, 2)
    assert len(units) > 1 and isinstance(units[0], Encoded)
