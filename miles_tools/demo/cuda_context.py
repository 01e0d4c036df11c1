"""Creates the context of the first GPU in a thread, while this process imports its packages.

A process's first use of a GPU takes tenths of a second to seconds: the driver starts, and creates a context that torch uses later. Neither
needs Python's lock, so both happen next to imports.
"""

from __future__ import annotations

import ctypes
import os
import threading

__all__ = ["open_context"]

LIBRARY = "libcuda.so.1"


def open_context() -> threading.Thread | None:
    """Start creating the context of the first visible GPU. Call it only in a process that will use this GPU.

    Returns the thread; None without a driver or with ``CUDA_VISIBLE_DEVICES`` empty. If the driver refuses, later calls report it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    thread = threading.Thread(target=_retain_context, args=(driver,), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _retain_context(driver: ctypes.CDLL) -> None:
    """Initialise the driver and retain the primary context of device 0 until the process ends."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
