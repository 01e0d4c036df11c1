"""How fast memory is copied here: what a weight sync is compared with."""

from __future__ import annotations

import logging
import shutil
import time

import torch

from miles_zero_copy import segment

log = logging.getLogger(__name__)

#: Bytes that a probe copies, how few it makes do with where there is no memory for more, and how often.
PROBE_BYTES, LEAST_PROBE, PROBES = 64 << 20, 1 << 20, 3
#: Those on a GPU, where less is over before it is measured.
GPU_PROBE_BYTES = 256 << 20


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
