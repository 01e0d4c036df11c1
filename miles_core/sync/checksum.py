"""The checksum of memory, and copies that add up on the way what they copy.

``checksum`` defines it. A CPU adds up what it has just copied, which is in its cache still. A GPU with Triton copies and adds up in one pass
(``checksum_kernel``); without, it reads everything once more. The sums are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from miles_core.precision.gpu_kernel import usable

#: Bytes a checksum adds up at a time; pieces of memory are multiples of it.
BLOCK = 1024
#: Bytes that a CPU copies before it adds them up: they are in its cache still.
PIECE = 1 << 20
#: Blocks whose numbers are made together.
_ROUND = 1 << 15
#: 2^64 divided by the golden ratio, odd: multiples of it lie far apart.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
#: What a GPU copies 16 bytes at a time has to begin at a multiple of them.
ALIGNED = 16


def checksum(*pieces: Tensor) -> int:
    """Of bytes [n] uint8, n a multiple of ``BLOCK``, one piece after the other, on any device: the sums of their blocks as 64-bit
    words, each times an odd number of its own, added up; modulo 2^64.

    Reads memory once at the speed of a sum, and one number leaves the device. Finds any change of one word, and whatever is
    missing, late or in another block's place; not words that changed places within a block.
    """
    nbytes = sum(map(len, pieces))
    if usable(pieces[0]) and _aligned(*pieces):
        return OnePass(*pieces).of(nbytes)
    sums = torch.empty(nbytes // BLOCK, dtype=torch.int64, device=pieces[0].device)
    at = 0
    for piece in pieces:
        words = _blocks(piece)
        torch.sum(words, 1, out=sums[at : at + len(words)])
        at += len(words)
    return _weighed(sums)


def _blocks(flat: Tensor) -> Tensor:
    """Bytes as 64-bit words, a block a row."""
    return flat.view(torch.int64).view(-1, BLOCK // 8)


def _weighed(sums: Tensor) -> int:
    """The checksum of blocks with these sums [blocks]."""
    return int((sums * _weights(-(-len(sums) // _ROUND) * _ROUND, sums.device)[: len(sums)]).sum()) % (1 << 64)


@lru_cache(4)
def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each of so many blocks."""
    return (2 * torch.arange(count, device=device) + 1) * _SPREAD


class Sum:
    """The checksum of pieces of memory, one behind the other, that are written or read from the first byte to the last one; made in
    one go at the end."""

    def __init__(self, *pieces: Tensor) -> None:
        self.pieces = pieces

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        """As ``to.copy_(source)``, one of which lies at byte ``at``. Where ``source`` ``stays`` as it is, the copy may be made as late as
        in ``of``."""
        to.copy_(source)

    def up_to(self, end: int) -> None:
        """The bytes before ``end``, a multiple of ``BLOCK``, are there."""

    def of(self, end: int) -> int:
        """The checksum of all bytes before ``end``."""
        starts = accumulate(map(len, self.pieces), initial=0)
        return checksum(*(piece[: max(end - start, 0)] for start, piece in zip(starts, self.pieces, strict=False)))


class InCache(Sum):
    """Of a CPU's memory, one piece: a large tensor is copied bit by bit, and what was is added up while the CPU's cache has it."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat)
        self._words, self._begun = _blocks(flat[: len(flat) // BLOCK * BLOCK]), 0
        self._sums = torch.empty(len(self._words), dtype=torch.int64)

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        if to.nbytes < PIECE or not _alike(to, source):
            to.copy_(source)
            return
        for place, piece in zip(*(t.view(-1).split(PIECE // t.itemsize) for t in (to, source)), strict=True):
            place.copy_(piece)
            at += place.nbytes
            self.up_to(at // BLOCK * BLOCK)

    def up_to(self, end: int) -> None:
        if end - self._begun >= PIECE:
            self._add(end)

    def of(self, end: int) -> int:
        self._add(end)
        return _weighed(self._sums[: end // BLOCK])

    def _add(self, end: int) -> None:
        new = slice(self._begun // BLOCK, end // BLOCK)
        torch.sum(self._words[new], 1, out=self._sums[new])
        self._begun = end


class OnePass(Sum):
    """Of a GPU's memory, by its kernel: ``of`` copies and adds up in one launch, and waits for it."""

    def __init__(self, *pieces: Tensor) -> None:
        super().__init__(*pieces)
        self._total = torch.zeros(1, dtype=torch.int64, device=pieces[0].device)
        self._jobs: list[tuple[int, int, int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        self._over = False

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        blocks, odd = divmod(to.nbytes, BLOCK)
        least = 0 if stays else PIECE  # a launch of its own takes longer than reading less once more
        if self._over or odd or to.nbytes <= least or not _alike(to, source) or at % BLOCK or not _aligned(to, source):
            to.copy_(source)
            return
        self._jobs.append((source.data_ptr(), to.data_ptr(), at // BLOCK, blocks))
        self._copied.append((at // BLOCK, at // BLOCK + blocks))
        if stays:
            self._kept += (to, source)
        else:
            self._run()

    def of(self, end: int) -> int:
        self._jobs += [(address, 0, first, behind - first) for address, first, behind in self._rest(end // BLOCK)]
        self._run()
        self._over, self._kept = True, []
        return int(self._total) % (1 << 64)

    def _rest(self, end: int) -> Iterator[tuple[int, int, int]]:
        """Address, first block and the one behind the last of what was not copied, before block ``end``."""
        copied, at = deque(sorted(self._copied)), 0
        for piece in self.pieces:
            first, behind, start = at, min(at + len(piece) // BLOCK, end), piece.data_ptr() - at * BLOCK
            while first < behind:
                until, go_on = copied.popleft() if copied and copied[0][0] < behind else (behind, behind)
                if first < until:
                    yield start + first * BLOCK, first, until
                first = go_on
            at += len(piece) // BLOCK

    def _run(self) -> None:
        """Make the jobs that wait."""
        from miles_core.sync import checksum_kernel  # needs Triton

        jobs, self._jobs = self._jobs, []
        if jobs:
            with torch.cuda.device(self._total.device):
                checksum_kernel.run(jobs, self._total, BLOCK, _SPREAD)


def summing(*pieces: Tensor) -> Sum:
    """The fastest way to add up these bytes, which are one piece on a CPU."""
    if usable(pieces[0]) and _aligned(*pieces):
        return OnePass(*pieces)
    return InCache(*pieces) if pieces[0].device.type == "cpu" else Sum(*pieces)


def _alike(to: Tensor, source: Tensor) -> bool:
    """Whether a copy moves bytes as they are, from the first to the last one."""
    return (
        to.dtype == source.dtype
        and to.device == source.device
        and to.shape == source.shape
        and to.is_contiguous()
        and source.is_contiguous()
    )


def _aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % ALIGNED == 0 for t in tensors)
