"""The paths that buckets take from one process to another: whose memory they lie in, and how fast it can be."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_core.backend import Bucket, DeviceMemory
from miles_zero_copy import segment
from miles_zero_copy.segment import Segment

#: Bytes that a probe copies, and how often.
PROBE_BYTES, PROBES = 64 << 20, 3


class Slot(ABC):
    """Memory for one bucket."""

    def __init__(self, buffer: Tensor) -> None:
        self.bucket = Bucket(buffer)

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """How the receiver gets at the bucket's bytes: the ``memory`` of its message."""

    def close(self) -> None:
        """Free it."""


class SegmentSlot(Slot):
    """A bucket in shared memory."""

    def __init__(self, nbytes: int) -> None:
        self._segment = Segment(nbytes)
        super().__init__(self._segment.buffer)

    def memory(self) -> dict[str, Any]:
        path = str(self._segment.path)
        return {"kind": "file", "key": path, "path": path}

    def close(self) -> None:
        self._segment.close()


class DeviceSlot(Slot):
    """A bucket in GPU memory that other processes of this host can map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = DeviceMemory(nbytes, device)
        super().__init__(self._memory.buffer)

    def memory(self) -> dict[str, Any]:
        return self._memory.memory

    def close(self) -> None:
        self._memory.close()


class MessageSlot(Slot):
    """A bucket that travels inside its message."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(torch.zeros(nbytes, dtype=torch.uint8))

    def memory(self) -> dict[str, Any]:
        return {"kind": "data", "data": self.bucket.filled.numpy().tobytes()}


@dataclass(frozen=True)
class Path:
    """A way for buckets.

    Attributes:
        name: what the log calls it.
        make: makes a slot of so many bytes; NoSegmentError or SyncError where it cannot.
        limit: measures the bytes a second of one copy in its memory; None where there is none to compare with.
    """

    name: str
    make: Callable[[int], Slot]
    limit: Callable[[], float] | None = None


def paths(device: torch.device) -> list[Path]:
    """Every way there may be for tensors on ``device``, the fastest first."""
    found = [
        Path("shared memory", SegmentSlot, copy_speed),
        Path("messages over the runtime's channel", MessageSlot),
    ]
    if device.type == "cuda":
        found.insert(
            0, Path("GPU memory by handle", lambda n: DeviceSlot(n, device), lambda: copy_speed(device=str(device)))
        )
    return found


def copy_speed(nbytes: int = PROBE_BYTES, device: str = "cpu") -> float:
    """Bytes a second of a copy within one memory: the best of a few."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
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
        found["one copy of GPU memory"] = f"{copy_speed(1 << 30, 'cuda') / 1e9:.0f} GB/s"
    if segment.DIRECTORY.is_dir():
        free = shutil.disk_usage(segment.DIRECTORY).free
        found["shared memory"] = (
            f"{free / 1e9:.1f} GB free in {segment.DIRECTORY}; a run takes two buckets (--sync-bucket-size)"
        )
    else:
        found["shared memory"] = f"none ({segment.DIRECTORY} is not there): weights travel in messages"
    return found
