"""Starts a kernel while the previous one on its stream still runs (CUDA's programmatic dependent launch, compute capability 9.0 and newer).

A decode step is a chain of hundreds of kernels that take some microseconds each. Without overlap, the GPU drains after each of them before
it starts the next one. A kernel that is launched with ``overlap`` starts earlier and calls ``wait``, after which the memory operations of all
earlier kernels are complete. Until then it may compute addresses, but may not access memory. A kernel that is launched without ``overlap``, such
as torch's, starts when all earlier ones are complete.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["overlap", "release", "wait"]

#: First CUDA version of a driver whose graphs record such launches.
_GRAPHS = 12030


@triton.jit
def wait(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all earlier kernels are complete. Every kernel calls it once, before its first access to memory and outside of branches."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def release(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start when all programs have called this or ended.

    While they wait, its programs occupy multiprocessors. A short kernel calls this at its start, a kernel with a loop after the loop."""
    if OVERLAP:
        gdc_launch_dependents()


def overlap(x: Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel on the device of ``x``: its argument ``OVERLAP``, and Triton's option where that is true."""
    return {"OVERLAP": True, "launch_pdl": True} if x.is_cuda and _can_overlap(x.device) else {"OVERLAP": False}


def _driver_version() -> int:
    """Return the CUDA version of the driver, such as 12030 for 12.3, or 0 without one; torch's may be newer."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


#: A constant, because ``torch.compile`` cannot trace calls of ``ctypes``.
_DRIVER = _driver_version()


@cache
def _can_overlap(device: torch.device) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return _DRIVER >= _GRAPHS
