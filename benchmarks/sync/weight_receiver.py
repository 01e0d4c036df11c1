"""The other side of ``weight_sync.py``: a process that takes buckets and copies what is in them, spoken to through a socket."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from miles_core.data import Encoded
from miles_core.run.parts import freeze_gc
from miles_workers.transport import Arrival, Arrivals
from miles_workers.weight_block import Table, read_block


class Own:
    """Tensors of the receiver's own, into which it copies what came; with ``stay`` lasting ones are read where they are."""

    def __init__(self, device: str, stay: bool = False) -> None:
        self.device, self.stay, self.tensors = device, stay, dict[str, torch.Tensor]()

    def take(self, units: Iterable[Encoded]) -> None:
        """Copy all of them."""
        for unit in units:
            for name, tensor in unit.parts.items():
                if self.stay and unit.lasting:
                    self.tensors[name] = tensor
                    continue
                if name not in self.tensors:
                    self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                unit.copy(self.tensors[name], tensor)
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()

    def read(self, table: Table, data: Any) -> None:
        """Copy the tensors of a block."""
        self.take(read_block(table, data))


async def put(connection: socket.socket, message: Any) -> None:
    """Send a message. ``multiprocessing``'s pipes take new memory for all of a large one at every piece they read of it."""
    data = pickle.dumps(message, 5)
    loop = asyncio.get_running_loop()
    head = len(data).to_bytes(8, "little")
    if len(data) < 1 << 20:  # one system call, and one waking
        await loop.sock_sendall(connection, head + data)
        return
    await loop.sock_sendall(connection, head)
    await loop.sock_sendall(connection, data)


async def get(connection: socket.socket) -> Any:
    """The next message."""
    loop, head = asyncio.get_running_loop(), bytearray(8)
    await fill(loop, connection, head)
    data = bytearray(int.from_bytes(head, "little"))
    await fill(loop, connection, data)
    return pickle.loads(data)


async def fill(loop: asyncio.AbstractEventLoop, connection: socket.socket, data: bytearray) -> None:
    """With the next bytes."""
    left = memoryview(data)
    while left:
        left = left[await loop.sock_recv_into(connection, left) :]


def receiver(connection: socket.socket, device: str, gpu: int) -> None:
    """Another process: takes messages and copies what is in them into tensors of its own."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(gpu)
    connection.setblocking(False)
    freeze_gc()  # as a run does
    own = Own(device, stay=True)
    arrivals = Arrivals(lambda version, staged: Into(own))

    async def take(message: Any) -> None:
        try:
            await arrivals.receive(message, 1, message["last"])
            await put(connection, "")
        except Exception as error:  # reported to the sender
            await put(connection, f"{type(error).__name__}: {error}")

    async def serve() -> None:
        taking = set()
        while (message := await get(connection)) is not None:
            taking.add(task := asyncio.create_task(take(message)))
            task.add_done_callback(taking.discard)

    asyncio.run(serve())


class Into(Arrival):
    """Bucket by bucket."""

    def __init__(self, own: Own) -> None:
        self.own = own

    async def take(self, units: Iterator[Encoded]) -> None:
        """Copy them."""
        self.own.take(units)

    async def finish(self) -> None:
        """Nothing is to be done."""


class Elsewhere:
    """The receiver as an engine: ``receive`` returns when it has acknowledged."""

    def __init__(self, device: str, gpu: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = socket.socketpair()
        self.connection.setblocking(False)
        self.process = context.Process(target=receiver, args=(there, device, gpu), daemon=True)
        self.process.start()
        self.messages, self.answers = asyncio.Lock(), asyncio.Lock()

    async def receive(self, message: Any, last: bool) -> None:
        """One message."""
        async with self.messages:  # one may be under way still when the next one comes
            await put(self.connection, {**message, "last": last})
        async with self.answers:  # they come in the order of the messages
            said = await get(self.connection)
        if said:
            raise SystemExit(f"the receiver: {said}")

    def close(self) -> None:
        """End it."""
        asyncio.run(put(self.connection, None))
        self.process.join()
