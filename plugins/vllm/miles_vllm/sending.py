"""Sends weights to vLLM's workers in buckets (``miles_workers.transport``): in memory that they can map, of the GPU or of this host, or as bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.data import Encoded
from miles_workers.transport import Bucket, DeviceMemory, room_of, round_to_blocks


class HostMemory:
    """Anonymous memory of this host, which other processes of its user can map. It is freed when this process ends in any way.

    Args:
        nbytes: size in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("miles-weights")
        os.posix_fallocate(self._file, 0, nbytes)  # otherwise a missing page would kill the process when it is written
        self.buffer = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.memory = {"kind": "file", "key": f"{path}:{nbytes}", "path": path}

    def close(self) -> None:
        """Free the memory as soon as no process maps it."""
        os.close(self._file)


class MessageMemory:
    """Memory whose bytes are part of the message.

    Args:
        nbytes: size in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self.memory = {"kind": "data", "data": self.buffer.numpy().data}

    def close(self) -> None:
        """Nothing to free."""


#: Where weights travel -> allocates memory for a bucket.
_MEMORY: dict[str, Callable[[int], DeviceMemory | HostMemory | MessageMemory]] = {
    "cuda": lambda nbytes: DeviceMemory(nbytes, torch.device("cuda")),
    "cpu": HostMemory,
    "message": MessageMemory,
}


class Sender:
    """Sends updates through one bucket. Its memory is kept between updates and grows to the largest bucket.

    Args:
        limit: maximum bytes of a bucket; a larger tensor is a bucket of its own.
        where: where the weights travel: ``cuda``, the memory of this process's GPU; ``cpu``, that of this host; ``message``.
    """

    def __init__(self, limit: int, where: str) -> None:
        self._limit, self._where = limit, where
        self._memory: DeviceMemory | HostMemory | MessageMemory | None = None

    async def send(
        self, units: Iterable[Encoded], receive: Callable[[Mapping[str, Any], bool], Awaitable[None]]
    ) -> None:
        """Send all of ``units``, one bucket after the other.

        Args:
            units: the tensors of an update.
            receive: passes a message on, with whether it is the last one; returns when vLLM has read the bucket.
        """
        batches = self._split(units)
        batch, number = next(batches), 0
        while True:
            following = next(batches, None)
            bucket = Bucket(self._reserve(sum(map(room_of, batch))))
            for unit in batch:
                added = bucket.add(unit)
                assert added, "the reserved memory has room for the batch"
            assert self._memory is not None
            message = {**bucket.header(), "memory": self._memory.memory, "number": number, "sender": [0, 1]}
            if self._where == "cuda":
                torch.cuda.current_stream().synchronize()  # another process reads the memory
            await receive(message, following is None)
            if following is None:
                return
            batch, number = following, number + 1

    def close(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _split(self, units: Iterable[Encoded]) -> Iterator[list[Encoded]]:
        batch, size = list[Encoded](), 0
        for unit in units:
            if batch and size + room_of(unit) > self._limit:
                yield batch
                batch, size = [], 0
            batch.append(unit)
            size += room_of(unit)
        yield batch

    def _reserve(self, nbytes: int) -> Tensor:
        nbytes = max(round_to_blocks(nbytes), round_to_blocks(1))
        if self._memory is None or len(self._memory.buffer) < nbytes:
            self.close()
            self._memory = _MEMORY[self._where](nbytes)
        return self._memory.buffer
