"""The C library's allocator, for a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import platform

#: glibc's ``mallopt``: parameters, and the largest values it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = 2**31 - 1, 32 << 20


def keep_freed_memory() -> bool:
    """Let the allocator keep what is freed instead of giving it back to the system.

    A step frees hundreds of megabytes of activations and the next asks for them again; pages given back in between are mapped and
    zeroed once more, one fault each. The process then stays as large as it was at its largest.

    Returns:
        Whether the allocator is one that can be told (glibc's).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_TRIM_THRESHOLD, _NEVER) and library.mallopt(_MMAP_THRESHOLD, _LARGEST))
