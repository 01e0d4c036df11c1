"""The paths that buckets take from one process to another: whose memory they lie in, and how fast it can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from miles_transport import Broadcast
from miles_zero_copy.limits import GPU_PROBE_BYTES, copy_speed
from miles_zero_copy.segment import Segment
from miles_zero_copy.slots import BroadcastSlot, DeviceSlot, MessageSlot, SegmentSlot, Slot

#: Bytes of a bucket in host memory: large enough that a message costs little, small enough that the first one is soon there.
ENOUGH = 32 << 20


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
    return Path(make, limit, lends=True, ahead=1)


def broadcast(device: torch.device, engines: int) -> Path:
    """Through a process group with so many engines: NCCL on a GPU, gloo on a CPU."""
    group = Broadcast.open(engines, device)
    make = partial(BroadcastSlot, device=device, group=group)
    # A link is no faster with more, and the first and the last bucket are not hidden behind others.
    enough, probe = (512 << 20, 256 << 20) if device.type == "cuda" else (32 << 20, 16 << 20)
    return Path(make, enough=enough, probe=probe, ahead=1, close=group.close)
