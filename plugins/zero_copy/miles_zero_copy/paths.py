"""The paths that buckets take from one process to another: whose memory they lie in, and how fast it can be."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from miles_core import SyncError
from miles_core.backend import BLOCK, Broadcast, Bucket, DeviceMemory, difference
from miles_zero_copy import segment
from miles_zero_copy.segment import Segment

log = logging.getLogger(__name__)

#: Bytes that a probe copies, how few it makes do with where there is no memory for more, and how often.
PROBE_BYTES, LEAST_PROBE, PROBES = 64 << 20, 1 << 20, 3
#: Those on a GPU, where less is over before it is measured.
GPU_PROBE_BYTES = 256 << 20
#: Bytes of a bucket in host memory: large enough that a message costs little, small enough that the first one is soon there.
ENOUGH = 32 << 20

#: Tells the engine to receive a message, the last one or not.
Receive = Callable[[Mapping[str, Any], bool], Awaitable[None]]


class Slot(ABC):
    """Memory for one bucket."""

    def __init__(self, buffer: Tensor, written: Callable[[int], None] | None = None) -> None:
        self.bucket = Bucket(buffer, written)

    @abstractmethod
    def memory(self, header: Mapping[str, Any], version: int) -> dict[str, Any]:
        """How the receiver gets at the bytes of the bucket, whose ``header`` was made and which belongs to ``version``."""

    async def left(self) -> None:
        """Returns when the bytes of a bucket that may be under way still can be written over."""

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
    """A bucket in shared memory, from its byte ``start`` on, that is not filled again before a later version is in force. The last block
    of this memory says how much of all before it is there."""

    def __init__(self, segment: Segment, start: int = 0) -> None:
        count = segment.buffer[-BLOCK:].view(torch.int64).numpy()

        def written(nbytes: int) -> None:
            count[0] = start + nbytes

        written(0)
        super().__init__(segment.buffer[start:-BLOCK], written)
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


@dataclass(frozen=True)
class Path:
    """A way for buckets.

    Attributes:
        make: makes a slot of so many bytes; SyncError where it cannot.
        limit: measures the bytes a second of one copy in its memory, 0 where it cannot; None where that of the way itself is to be measured.
        enough: bytes of a bucket above which larger ones are not faster.
        probe: bytes of a bucket that shows how fast the way is.
        lends: engines read the trainer's own tensors where these have handles.
        stays: in this memory engines may read a whole version for as long as it is in force.
        ahead: how many buckets may be on their way while the engine takes the one before; their slots say when they ``left``.
        close: frees what all slots have in common.
    """

    make: Callable[[int], Slot]
    limit: Callable[[], float] | None = None
    enough: int = 1 << 40
    probe: int = 4 << 20
    lends: bool = False
    stays: bool = False
    ahead: int = 0
    close: Callable[[], None] = lambda: None


def paths(device: torch.device, engines: int = 1) -> dict[str, Callable[[], Path]]:
    """Every way there may be for tensors on ``device`` to so many engines, by name, the fastest first."""
    found: dict[str, Callable[[], Path]] = {}
    if device.type == "cuda":
        found["GPU memory by handle"] = partial(_handles, device)
        found["a broadcast (NCCL)"] = partial(broadcast, device, engines)
    found["shared memory"] = partial(_shared, stays=device.type == "cpu")
    found["messages over the runtime's channel"] = _messages
    return found


def _shared(stays: bool) -> Path:
    return Path(lambda nbytes: SegmentSlot(Segment(nbytes)), copy_speed, ENOUGH, stays=stays)


def _messages() -> Path:
    return Path(partial(MessageSlot, sent={}), enough=ENOUGH)


def _handles(device: torch.device) -> Path:
    make, limit = partial(DeviceSlot, device=device), partial(copy_speed, GPU_PROBE_BYTES, str(device))
    return Path(make, limit, lends=True)


def broadcast(device: torch.device, engines: int) -> Path:
    """Through a process group with so many engines: NCCL on a GPU, gloo on a CPU."""
    group = Broadcast.open(engines, device)
    make = partial(BroadcastSlot, device=device, group=group)
    # A link is no faster with more, and the first and the last bucket are not hidden behind others.
    enough, probe = (512 << 20, 256 << 20) if device.type == "cuda" else (32 << 20, 16 << 20)
    return Path(make, enough=enough, probe=probe, ahead=1, close=group.close)


def copy_speed(nbytes: int = PROBE_BYTES, device: str = "cpu") -> float:
    """Bytes a second of a copy within one memory: the best of a few, of fewer bytes where there is no memory for so many, and 0 where
    there is none for ``LEAST_PROBE`` either, which is said."""
    try:
        source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        if nbytes > LEAST_PROBE:
            return copy_speed(nbytes // 2, device)
        log.warning("a copy of memory cannot be measured: %s has not %d bytes free for it", device, 2 * nbytes)
        return 0.0
    best = float("inf")
    for _ in range(PROBES):
        start = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def limits() -> dict[str, str]:
    """What a weight sync is compared with on this host, for ``miles doctor --measure``."""
    found = {"one copy of memory": f"{copy_speed() / 1e9:.1f} GB/s"}
    if torch.cuda.is_available():
        speed = copy_speed(1 << 30, "cuda")
        found["one copy of GPU memory"] = f"{speed / 1e9:.0f} GB/s" if speed else "not measured: no memory is free"
    if segment.DIRECTORY.is_dir():
        free = shutil.disk_usage(segment.DIRECTORY).free
        found["shared memory"] = (
            f"{free / 1e9:.1f} GB free in {segment.DIRECTORY}; a run takes up to half of it for two versions of the weights, or two buckets"
        )
    else:
        found["shared memory"] = f"none ({segment.DIRECTORY} is not there): weights travel in messages"
    return found
