"""Measures the speed of memory copies, the limit that weight syncs are compared with."""

from __future__ import annotations

import logging
import shutil
import time

import torch

from miles_zero_copy import segment

log = logging.getLogger(__name__)

#: Bytes per probe copy, minimum bytes if memory is short, and number of probes.
PROBE_BYTES, LEAST_PROBE, PROBES = 64 << 20, 1 << 20, 3
#: Bytes per probe copy on a GPU, where smaller copies are too short to measure.
GPU_PROBE_BYTES = 256 << 20


def copy_speed(nbytes: int = PROBE_BYTES, device: str = "cpu") -> float:
    """Measure a copy within one memory; returns the best of ``PROBES`` in bytes per second.

    Halves ``nbytes`` while memory is insufficient. Below ``LEAST_PROBE`` it logs a warning and returns 0."""
    try:
        source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        if nbytes > LEAST_PROBE:
            return copy_speed(nbytes // 2, device)
        log.warning("cannot measure the speed of a memory copy: %s does not have %d bytes free", device, 2 * nbytes)
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
    """Return the measured limits of this host by name, for ``miles doctor --measure``."""
    found = {"one copy of memory": f"{copy_speed() / 1e9:.1f} GB/s"}
    if torch.cuda.is_available():
        speed = copy_speed(1 << 30, "cuda")
        found["one copy of GPU memory"] = f"{speed / 1e9:.0f} GB/s" if speed else "not measured: no memory is free"
    if segment.DIRECTORY.is_dir():
        free = shutil.disk_usage(segment.DIRECTORY).free
        found["shared memory"] = (
            f"{free / 1e9:.1f} GB free in {segment.DIRECTORY}; a run uses up to half of it for two versions of the weights, or two buckets"
        )
    else:
        found["shared memory"] = f"none ({segment.DIRECTORY} does not exist): weights are sent in messages"
    return found
