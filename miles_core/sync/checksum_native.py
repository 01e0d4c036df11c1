"""One pass of a CPU over memory: copies it and adds it up, in C (``checksum.c``). The sums are those of ``checksum``, to the bit."""

from __future__ import annotations

import logging
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from miles_core.native import Native

log = logging.getLogger(__name__)

NATIVE = Native(
    Path(__file__).parent, ("checksum.c",), {"copy_and_add": [c_void_p, c_void_p, c_void_p, c_int64, c_int]}
)


@cache
def available() -> bool:
    """Whether there is a C compiler, or was; said once where there is none."""
    if why := NATIVE.why_not():
        log.info("weights are copied and added up by PyTorch, which takes about twice as long: %s", why)
    return not why


def copy_and_add(source: int, to: int, sums: int, blocks: int) -> None:
    """Copy so many blocks from one address to another, and write the sum of each, an int64, from ``sums`` on; by as many threads as PyTorch
    has. Whoever sees what is written later, in another process too, sees the copy."""
    NATIVE.library().copy_and_add(source, to, sums, blocks, torch.get_num_threads())
