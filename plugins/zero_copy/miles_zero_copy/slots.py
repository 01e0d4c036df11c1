"""Memory for one bucket, whichever memory it is, and how the bucket gets from there to the engine."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin import SyncError
from miles_transport import Broadcast, Bucket, DeviceMemory, difference
from miles_zero_copy.segment import Segment

#: Tells the engine to receive a message, the last one or not.
Receive = Callable[[Mapping[str, Any], bool], Awaitable[None]]


class Slot(ABC):
    """Memory for one bucket."""

    def __init__(self, buffer: Tensor) -> None:
        self.bucket = Bucket(buffer)
        self.reading: asyncio.Task[float] | None = None  # the last ``deliver``

    @abstractmethod
    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        """How the receiver gets at the bytes of the bucket, whose ``header`` was made and which belongs to ``version``."""

    def travels(self, header: Mapping[str, Any], memory: Mapping[str, Any], packed: int) -> int:
        """How many bytes are moved for a bucket with ``packed`` bytes of tensors."""
        return packed

    async def left(self) -> None:
        """Returns when the bytes of a bucket that may be under way still can be written over."""
        if self.reading is not None and not self.reading.done():
            await asyncio.wait([self.reading])

    async def deliver(self, receive: Receive, message: Mapping[str, Any], last: bool) -> float:
        """Send the message about the bucket; returns when the engine has taken what is in it, with the seconds its bytes took."""
        start = time.perf_counter()
        await receive(message, last)
        return time.perf_counter() - start

    def close(self) -> None:
        """Free it."""


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
    """A bucket in shared memory, from its byte ``start`` on, that is not filled again before a later version is in force."""

    def __init__(self, segment: Segment, start: int = 0) -> None:
        super().__init__(segment.buffer[start:])
        self.start, self._segment = start, segment

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        path = str(self._segment.path)
        return {"kind": "file", "key": path, "path": path, "start": self.start, "stays": True}


class DeviceSlot(Slot):
    """A bucket in GPU memory that other processes of this host can map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = DeviceMemory(nbytes, device)
        super().__init__(self._memory.buffer)

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        return self._memory.memory

    def close(self) -> None:
        self._memory.close()


class BroadcastSlot(Slot):
    """A bucket that every engine gets through a process group; ``group`` is the sender's end."""

    def __init__(self, nbytes: int, device: torch.device, group: Broadcast) -> None:
        try:
            super().__init__(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError as error:
            raise SyncError(f"{nbytes:,} bytes of GPU memory for a broadcast are not to be had") from error
        self._group = group
        self._sending: asyncio.Task[float] | None = None

    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        times = 1 if header["units"] else 2  # the second time everybody is there
        return {**self._group.memory, "turn": self._group.turn(), "times": times}

    def travels(self, header: Mapping[str, Any], memory: Mapping[str, Any], packed: int) -> int:
        return int(header["nbytes"])  # whole blocks are sent

    async def left(self) -> None:
        if self._sending is not None and not self._sending.done():
            await asyncio.wait([self._sending])

    async def deliver(self, receive: Receive, message: Mapping[str, Any], last: bool) -> float:
        where = message["memory"]
        told = asyncio.ensure_future(receive(message, last))
        sent = asyncio.create_task(
            asyncio.to_thread(self._group.send, self.bucket.filled, where["turn"], where["times"])
        )
        self._sending = sent
        for late in (told, sent):
            late.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody's, after the first error
        await asyncio.wait([told, sent], return_when=asyncio.FIRST_EXCEPTION)
        if told.done() and told.exception() is not None:
            self._group.close()
        if told.done():
            await told
        seconds = await sent
        await told
        return seconds


class MessageSlot(Slot):
    """A bucket that travels inside its message: what changed of it since it was sent last, where that is less.

    ``sent`` is what was sent last of each bucket, by the name of its first tensor: [version, checksum] and bytes. Both sides
    hold these, so this takes as much host memory as the encoded weights on each.
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
