"""A process group of its own, with two receivers (as threads, which gloo does not mind)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from miles_core.errors import SyncError
from miles_workers.transport.broadcast import Broadcast

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_this_host(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="lists sockets by /proc")
@pytest.mark.parametrize(("interface", "address"), [("lo", "0100007F"), ("eth0", "00000000")])
def test_a_group_on_the_loopback_interface_listens_there_only(monkeypatch, interface, address):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    end = Broadcast.open(1, CPU)
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f"{end.memory['port']:04X}"
    assert [row[1] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"] == [f"{address}:{port}"]
    assert (end.memory["hosts"] == ["127.0.0.1"]) is (interface == "lo")
    end.close()


def test_every_receiver_gets_the_bytes_bucket_after_bucket():
    end = Broadcast.open(2, CPU)
    first, second = (torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (4096, 1024))

    def receive():
        mine = Broadcast.join(end.memory)
        with ThreadPoolExecutor() as both:  # who asks for the second one first still gets the first one first
            asked = [both.submit(mine.receive, 1024, 1), both.submit(mine.receive, 4096, 0, times=2)]
            found = [each.result() for each in reversed(asked)]
        mine.close()
        return found

    with ThreadPoolExecutor() as pool:
        receivers = [pool.submit(receive) for _ in range(2)]
        assert [end.turn(), end.turn()] == [0, 1]
        later = pool.submit(end.send, second, 1)
        assert end.send(first, 0, times=2) > 0 and later.result() > 0
        for found in receivers:
            assert torch.equal(found.result()[0], first) and torch.equal(found.result()[1], second)
        with pytest.raises(
            SyncError, match="all 2 receivers of a broadcast have joined already: this engine left it after an error"
        ):
            Broadcast.join(end.memory)
    end.close()


def test_who_is_not_there_in_time_and_who_cannot_be_reached_are_said():
    end = Broadcast.open(1, CPU, patience=0.2)
    with pytest.raises(
        SyncError, match="a broadcast among 2 processes failed on rank 0: the other members did not join in time"
    ):
        end.send(torch.zeros(1024, dtype=torch.uint8), 0)
    with pytest.raises(SyncError, match="broadcast 1 among 2 processes was cancelled: an earlier broadcast failed"):
        end.send(torch.zeros(1024, dtype=torch.uint8), 1)
    with pytest.raises(
        SyncError, match=r"the engine.s process cannot reach the trainer at 127.0.0.1, port 9, to receive"
    ):
        Broadcast.join({**end.memory, "hosts": ["127.0.0.1"], "port": 9})
    with pytest.raises(SyncError, match="cannot reach the trainer"):  # somebody else's store
        Broadcast.join({**end.memory, "key": "another"})
    if not torch.cuda.is_available():
        with pytest.raises(SyncError, match="the engine's process has no GPU"):
            Broadcast.join({**end.memory, "device": "cuda"})


def test_a_receiver_without_memory_says_so(monkeypatch):
    end = Broadcast(None, CPU, 1, 2, 1.0)

    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(SyncError, match="the engine's GPU has no 1,024 bytes of free memory to receive a broadcast"):
        end.receive(1024, 0)
