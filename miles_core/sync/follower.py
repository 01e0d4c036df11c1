"""A checksum that is made while another process writes the bytes."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from miles_core.sync.checksum import BLOCK, PIECE, BlockSums, Sum

#: Seconds between two looks at how far the writer is: at first, and at most.
_NAP, _LONG_NAP = 2e-5, 2e-3
#: Seconds without a byte after which nothing is followed any more.
PATIENCE = 10.0


class Follower:
    """Adds up shared memory from its first byte on, as far as its writer says that it is there: beside the writer, and while what it
    wrote is in the cache that the two may share. What is left at the end is made up for, so that whoever asks always gets the sum.

    Args:
        flat: [n] uint8, n a multiple of ``BLOCK``, where another process writes.
        count: [8] uint8, a 64-bit number that the writer keeps: how many bytes of ``flat`` are there for good.
    """

    def __init__(self, flat: Tensor, count: Tensor) -> None:
        self._blocks, self._count = BlockSums(flat), count.view(torch.int64).numpy()
        self._done, self._turn = 0, threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._follow, name="checksum-follower", daemon=True)
        self._thread.start()

    def sum(self, start: int) -> Sum:
        """Of the bytes from ``start`` on, a multiple of ``BLOCK``."""
        return _Followed(self, start)

    def checksum(self, start: int, end: int) -> int:
        """That of the bytes from ``start`` to ``end``, which are there."""
        self._up_to(end)
        return self._blocks.checksum(start, end)

    def stop(self) -> None:
        """Look no more: no later sum is wanted."""
        self._stopped = True

    def _follow(self) -> None:
        nap, last = _NAP, time.monotonic()
        while not self._stopped and time.monotonic() - last < PATIENCE:
            there = int(self._count[0]) // BLOCK * BLOCK
            if there > self._done:
                self._up_to(there)
                nap, last = _NAP, time.monotonic()
            time.sleep(nap)
            nap = min(2 * nap, _LONG_NAP)

    def _up_to(self, end: int) -> None:
        with self._turn:
            while self._done < end:
                piece = min(self._done + PIECE, end)
                self._blocks.add(self._done, piece)
                self._done = piece


class _Followed(Sum):
    """The sum of a bucket that a follower has."""

    def __init__(self, follower: Follower, start: int) -> None:
        super().__init__()
        self._follower, self._from = follower, start

    def of(self, end: int) -> int:
        return self._follower.checksum(self._from, self._from + end)
