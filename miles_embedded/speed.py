"""Measures what limits the embedded backend on this machine: memory copies, matrix products and kernel launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: Bytes of the copied tensor and size of the square matrices, on a GPU and on a CPU.
_COPY = {"cuda": 1 << 30, "cpu": 64 << 20}
_SIZE = {"cuda": 8192, "cpu": 512}
#: Repetitions of a measurement, of which the fastest counts, and launches in one of them.
_REPETITIONS, _LAUNCHES = 5, 1000


def measure_speeds() -> dict[str, str]:
    """Return measured speeds by name, for ``miles doctor --measure``. Takes about a second."""
    places = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {name: text for place in places for name, text in _measure_device(torch.device(place)).items()}


def _measure_device(device: torch.device) -> dict[str, str]:
    name = "CPU" if device.type == "cpu" else f"GPU {device.index}"
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16,)
    try:
        found = {f"{name}, copy": f"{_copy_speed(device) / 1e9:,.1f} GB/s read and written"}
        for dtype in dtypes:
            label = str(dtype).removeprefix("torch.")
            found[f"{name}, {label} product"] = f"{_product_speed(device, dtype) / 1e9:,.1f} GFLOP/s"
        if device.type == "cuda":
            seconds = _launch_seconds(device)
            found[f"{name}, launch of a kernel"] = f"{seconds * 1e6:.1f} us ({1 / seconds:,.0f} per second)"
    except torch.OutOfMemoryError:
        return {name: "not measured: its memory is in use"}
    return found


def _copy_speed(device: torch.device) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source, target = (torch.ones(_COPY[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * len(source) / _best_time(device, lambda: target.copy_(source))


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product."""
    size = _SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_time(device, lambda: left @ right)


def _launch_seconds(device: torch.device) -> float:
    """Seconds between kernels that do almost nothing, so that launching them takes longer than running them."""
    tensor = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            tensor.add_(1)

    return _best_time(device, launch) / _LAUNCHES


def _best_time(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest time of ``work`` in seconds, after one call that is not measured."""
    best = float("inf")
    for repetition in range(_REPETITIONS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repetition:
            best = min(best, time.perf_counter() - start)
    return best
