"""A C implementation for CPUs (``checksum.c``): sums memory, and optionally copies it, in one pass. Same sums as ``checksum``."""

from __future__ import annotations

import logging
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from miles_formats.native import Native

log = logging.getLogger(__name__)

NATIVE = Native(
    Path(__file__).parent,
    ("checksum.c",),
    {"add_blocks": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int]},
)


@cache
def available() -> bool:
    """Whether the C library can be built or is available; logs the reason once if not."""
    if why := NATIVE.why_not():
        log.info("PyTorch computes the checksums of weights, which takes several times as long as C: %s", why)
    return not why


def add_blocks(source: int, to: int, sums: int, multipliers: int, blocks: int) -> None:
    """Write the sum of each block, an int64, to ``sums``, using as many threads as PyTorch.

    Args:
        source: address of the first block.
        to: address to copy the blocks to, or 0. The copy is visible to other processes before anything written after this call.
        sums: address of the sums.
        multipliers: address of ``checksum.MULTIPLIERS``.
        blocks: number of blocks.
    """
    NATIVE.library().add_blocks(source, to, sums, multipliers, blocks, torch.get_num_threads())
