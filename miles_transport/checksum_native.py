"""One pass of a CPU over memory, in C (``checksum.c``): adds it up and, if asked, copies it. The sums equal those of ``checksum``."""

from __future__ import annotations

import logging
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from miles_tools.native import Native

log = logging.getLogger(__name__)

NATIVE = Native(
    Path(__file__).parent,
    ("checksum.c",),
    {"add_blocks": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int]},
)


@cache
def available() -> bool:
    """Whether a C compiler is or was available; logs the reason once where none is."""
    if why := NATIVE.why_not():
        log.info("PyTorch computes the checksums of weights, which takes several times as long: %s", why)
    return not why


def add_blocks(source: int, to: int, sums: int, multipliers: int, blocks: int) -> None:
    """Write the sum of each block, an int64, from ``sums`` on, with as many threads as PyTorch uses.

    Args:
        source: address of the first block.
        to: address to copy the blocks to, or 0. Processes that see what is written after this call also see the copy.
        sums: address of the sums.
        multipliers: address of the ``checksum.MULTIPLIERS``.
        blocks: number of blocks.
    """
    NATIVE.library().add_blocks(source, to, sums, multipliers, blocks, torch.get_num_threads())
