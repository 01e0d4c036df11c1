"""Slots: memory for one bucket, of different kinds, and the delivery of the bucket to the engine."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin import SyncError
from miles_workers.transport import Broadcast, Bucket, DeviceMemory, difference
from miles_zero_copy.segment import Segment

#: Calls the engine's ``receive`` with a message and whether it is the last one.
Receive = Callable[[Mapping[str, Any], bool], Awaitable[None]]


class Slot(ABC):
    """Memory for one bucket."""

    def __init__(self, buffer: Tensor) -> None:
        self.bucket = Bucket(buffer)
        self.reading: asyncio.Task[float] | None = None  # the last ``deliver``

    @abstractmethod
    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Describe to the receiver how to read the bytes of the bucket with this ``header``, which belongs to ``version``."""

    def travels(self, header: Mapping[str, Any], memory: Mapping[str, Any], packed: int) -> int:
        """Return the number of bytes moved for a bucket with ``packed`` bytes of tensors."""
        return packed

    async def left(self) -> None:
        """Wait until the memory can be overwritten, that is, until a delivery in progress has read it."""
        if self.reading is not None and not self.reading.done():
            await asyncio.wait([self.reading])

    async def deliver(self, receive: Receive, message: Mapping[str, Any], last: bool) -> float:
        """Send the message about the bucket and wait until the engine has read it; returns the seconds of the transfer."""
        start = time.perf_counter()
        await receive(message, last)
        return time.perf_counter() - start

    def close(self) -> None:
        """Free the memory."""


class SegmentSlot(Slot):
    """A bucket in shared memory."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.buffer)
        self._segment = segment

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        path = str(self._segment.path)
        return {"kind": "file", "key": path, "path": path}

    def close(self) -> None:
        self._segment.close()


class StandingSlot(Slot):
    """A bucket in shared memory from byte ``start`` on, which is not overwritten until engines serve a later version."""

    def __init__(self, segment: Segment, start: int = 0) -> None:
        super().__init__(segment.buffer[start:])
        self.start, self._segment = start, segment

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        path = str(self._segment.path)
        return {"kind": "file", "key": path, "path": path, "start": self.start, "stays": True}


class DeviceSlot(Slot):
    """A bucket in GPU memory that other processes on this host can map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = DeviceMemory(nbytes, device)
        super().__init__(self._memory.buffer)

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        return self._memory.memory

    def close(self) -> None:
        self._memory.close()


class BroadcastSlot(Slot):
    """A bucket that is broadcast to all engines through a process group; ``group`` is the sender's end."""

    def __init__(self, nbytes: int, device: torch.device, group: Broadcast) -> None:
        try:
            super().__init__(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            raise SyncError(f"{nbytes:,} bytes of GPU memory for a broadcast cannot be allocated") from error
        self._group = group
        self._sending: asyncio.Task[float] | None = None

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        times = 1 if header["units"] else 2  # a probe is sent twice; the second time, all engines are ready
        return {**self._group.memory, "turn": self._group.turn(), "times": times}

    def travels(self, header: Mapping[str, Any], memory: Mapping[str, Any], packed: int) -> int:
        return int(header["nbytes"])  # whole blocks are sent

    async def left(self) -> None:
        if self._sending is not None and not self._sending.done():
            await asyncio.wait([self._sending])

    async def deliver(self, receive: Receive, message: Mapping[str, Any], last: bool) -> float:
        where = message["memory"]
        received = asyncio.ensure_future(receive(message, last))
        sent = asyncio.create_task(
            asyncio.to_thread(self._group.send, self.bucket.filled, where["turn"], where["times"])
        )
        self._sending = sent
        for late in (received, sent):
            late.add_done_callback(lambda done: done.cancelled() or done.exception())  # later errors are not raised
        await asyncio.wait([received, sent], return_when=asyncio.FIRST_EXCEPTION)
        if received.done() and received.exception() is not None:
            self._group.close()
        if received.done():
            await received
        seconds = await sent
        await received
        return seconds


class MessageSlot(Slot):
    """A bucket that is sent inside its message, as the difference to its last contents if that is smaller.

    ``sent`` maps the name of a bucket's first tensor to its last [version, checksum] and bytes. Both sides keep these, so each needs as
    much additional host memory as the encoded weights.
    """

    def __init__(self, nbytes: int, sent: dict[str, tuple[list[int], Tensor]]) -> None:
        super().__init__(torch.zeros(nbytes, dtype=torch.uint8))
        self._sent = sent

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        new = self.bucket.filled
        if not header["units"]:
            return {"kind": "data", "data": new.numpy().tobytes()}
        key = header["units"][0][0]
        kept = {"keep": key, "version": version}
        name, base = self._sent.pop(key, ([], new[:0]))
        changed = difference(new, base) if len(base) == len(new) else None
        self._sent[key] = [version, header["checksum"]], base.copy_(new) if len(base) == len(new) else new.clone()
        if changed is None:
            return {"kind": "data", "data": new.numpy().tobytes(), **kept}
        return {"kind": "delta", "data": changed, "base": name, **kept}

    def travels(self, header: Mapping[str, Any], memory: Mapping[str, Any], packed: int) -> int:
        return len(memory["data"])
