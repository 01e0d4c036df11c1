"""Detects the environment of the program: versions, processor, memory, GPUs.

GPUs are queried through NVML, never through ``torch.cuda``, because the driver process must not initialise CUDA. This module does not
import torch or transformers; their versions come from the metadata of their distributions.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from miles_core.observe.bytecode import explain
from miles_core.redact import redact_values

PACKAGES = ("miles-core", "torch", "transformers", "numpy", "safetensors", "tokenizers")
FILE = "environment.json"


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes; ``sm`` is the compute capability as major * 10 + minor."""

    name: str
    sm: int
    memory: int
    free: int
    driver: str


@dataclass(frozen=True)
class Environment:
    """Software and hardware of this machine.

    Attributes:
        python, platform, processor: versions and names as reported by the system.
        cpus: logical processors this process may use.
        memory: bytes of RAM, or the limit of this process's control group if that is lower; 0 if unknown.
        packages: installed distribution -> version.
        gpus: NVIDIA GPUs.
        no_gpu: reason why there are none.
        imports: reason why imports are slow; empty if none was found.
    """

    python: str
    platform: str
    processor: str
    cpus: int
    memory: int
    packages: dict[str, str]
    gpus: tuple[Gpu, ...]
    no_gpu: str
    imports: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def environment() -> Environment:
    """Detect the environment. Takes milliseconds."""
    gpus, no_gpu = detect_gpus()
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        packages={name: found for name in PACKAGES if (found := find_version(name))},
        gpus=gpus,
        no_gpu=no_gpu,
        imports=explain(),
    )


def write_environment(run_dir: Path | str) -> None:
    """Record the environment of a run in its directory, for the report."""
    text = json.dumps(redact_values({**environment().to_dict(), "command": sys.argv}), indent=1)
    (Path(run_dir) / FILE).write_text(text + "\n", encoding="utf-8")


def find_version(distribution: str) -> str:
    """Return the version of a distribution, or "" if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def detect_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the NVIDIA GPUs that NVML reports, or the reason why there are none."""
    try:
        import pynvml
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(pynvml.nvmlDeviceGetName(handle))
            gpus.append(Gpu(name, major * 10 + minor, int(memory.total), int(memory.free), driver))
        return tuple(gpus), "" if gpus else "NVML finds no device"
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def bytes_text(count: float) -> str:
    """Format a number of bytes: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def cpu_info() -> str:
    """Return the content of ``/proc/cpuinfo``; "" if it does not exist."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _processor() -> str:
    for line in cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system, or the value is unavailable
        return 0
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total
