"""What is lent, told to an engine while more is found."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.backend import Encoded
from miles_zero_copy import sender
from miles_zero_copy.paths import MessageSlot, Path
from miles_zero_copy.sender import Sender

SIZE = 1 << 10


class Lent:
    """Stands in for a ``Loan``, which needs a GPU."""

    alive = 0

    def __init__(self):
        self.names, self.nbytes = [], 0
        Lent.alive += 1

    def __del__(self):
        Lent.alive -= 1

    def __len__(self):
        return len(self.names)

    def add(self, name, tensor):
        self.names.append(name)
        self.nbytes += tensor.nbytes
        return True

    def message(self):
        return {"units": self.names, "nbytes": self.nbytes, "memory": {"kind": "loan"}}


@pytest.mark.parametrize("count", [1, 4, 9])
def test_an_engine_reads_some_while_the_next_ones_are_found(monkeypatch, count):
    monkeypatch.setattr(sender, "Loan", Lent)
    monkeypatch.setattr(sender, "LOAN", 2 * SIZE)
    monkeypatch.setattr(sender, "LENT", SIZE)
    names, told, waiting, most = [f"w{i}" for i in range(count)], [], 0, 0

    async def receive(message, last):
        nonlocal waiting, most
        told.append((message["memory"]["kind"], message["number"], list(message["units"]), last))
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        assert Lent.alive >= waiting  # nothing is let go that the engine reads
        waiting -= 1

    found = Sender(Path(lambda nbytes: MessageSlot(nbytes, {}), lends=True), 4 * SIZE, (0, 1))
    units = [Encoded(name, {name: torch.zeros(SIZE, dtype=torch.uint8)}, lasting=True) for name in names]
    sent = asyncio.run(found.send(iter(units), receive, 1))
    assert [name for kind, _, units, _ in told if kind == "loan" for name in units] == names
    assert [number for _, number, _, _ in told] == list(range(len(told))) and sent.buckets == len(told)
    assert [last for *_, last in told] == [False] * (len(told) - 1) + [True]
    assert len(told) == -(-count // 2) and most == min(len(told), 1 + sender.LOANS) and Lent.alive == 1
