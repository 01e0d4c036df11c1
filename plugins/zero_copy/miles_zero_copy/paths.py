"""The paths on which buckets are sent between processes: kind of memory, bucket sizes and speed limit of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from miles_workers.transport import Broadcast
from miles_zero_copy.limits import GPU_PROBE_BYTES, copy_speed
from miles_zero_copy.segment import Segment
from miles_zero_copy.slots import BroadcastSlot, DeviceSlot, MessageSlot, SegmentSlot, Slot

#: Bytes of a bucket in host memory: large enough to amortise a message, small enough that the first bucket arrives early.
ENOUGH = 32 << 20


@dataclass(frozen=True)
class Path:
    """A path for buckets.

    Attributes:
        make: allocates a slot of the given bytes; raises SyncError if it cannot.
        limit: measures the bytes per second of one copy in this memory, 0 if it cannot; None to measure the path itself.
        enough: bucket size in bytes above which larger buckets are not faster.
        probe: bytes of a bucket that measures the path.
        lends: engines can read the trainer's own tensors through handles.
        stays: engines may read a whole version in this memory while they serve it.
        ahead: number of buckets in flight while the engine reads the previous one; see ``Slot.left``.
        close: frees resources that all slots share.
    """

    make: Callable[[int], Slot]
    limit: Callable[[], float] | None = None
    enough: int = 1 << 40
    probe: int = 4 << 20
    lends: bool = False
    stays: bool = False
    ahead: int = 0
    close: Callable[[], None] = lambda: None


def paths(device: torch.device, engines: int = 1, colocated: bool = False) -> dict[str, Callable[[], Path]]:
    """Return name -> constructor of all possible paths for tensors on ``device`` to ``engines`` engines, fastest first.

    With ``colocated`` engines one of them is on the sender's GPU. NCCL accepts a GPU once per group, so there is no broadcast then."""
    found: dict[str, Callable[[], Path]] = {}
    if device.type == "cuda":
        found["GPU memory by handle"] = partial(_handles, device)
        if not colocated:
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
    return Path(make, limit, lends=True, ahead=1)


def broadcast(device: torch.device, engines: int) -> Path:
    """Create the path through a process group with ``engines`` engines: NCCL on a GPU, gloo on a CPU."""
    group = Broadcast.open(engines, device)
    make = partial(BroadcastSlot, device=device, group=group)
    # larger buckets do not increase the bandwidth, and the first and the last bucket do not overlap with others
    enough, probe = (512 << 20, 256 << 20) if device.type == "cuda" else (32 << 20, 16 << 20)
    return Path(make, enough=enough, probe=probe, ahead=1, close=group.close)
