"""The checksum of memory, and copies that add up on the way what they copy.

``checksum`` defines it. A GPU with Triton copies and adds up in one pass (``checksum_kernel``); without, it reads everything once more. So does a
CPU with a C compiler (``checksum_native``); without, it adds up what it has just copied, which is in its cache still. The sums are equal.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from miles_core.precision.gpu_kernel import usable
from miles_core.sync import checksum_native

#: Bytes a checksum adds up at a time; pieces of memory are multiples of it.
BLOCK = 1024
#: Bytes that a CPU copies before it adds them up: they are in its cache still.
PIECE = 2 << 20
#: Bytes that a GPU is given first to copy or add up, so that it is busy while the next ones are found, and at most; twice as many each time, as
#: a launch takes the host as long as some hundred megabytes take the GPU.
FIRST_LAUNCH, LAUNCH = 128 << 20, 4 << 30
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
        return OnePass(pieces[0].device, *pieces).of(nbytes)
    sums = torch.empty(nbytes // BLOCK, dtype=torch.int64, device=pieces[0].device)
    at = 0
    for piece in pieces:
        words = _words(piece)
        torch.sum(words, 1, out=sums[at : at + len(words)])
        at += len(words)
    return _weighed(sums)


class BlockSums:
    """The sums of the blocks of ``flat`` [n] uint8, made in any order; what is behind the last whole block does not count."""

    def __init__(self, flat: Tensor) -> None:
        self._words = _words(flat[: len(flat) // BLOCK * BLOCK])
        self._sums = torch.empty(len(self._words), dtype=torch.int64, device=flat.device)

    def add(self, start: int, end: int) -> None:
        """Make those of the bytes from ``start`` to ``end``, multiples of ``BLOCK``."""
        first, last = start // BLOCK, end // BLOCK
        torch.sum(self._words[first:last], 1, out=self._sums[first:last])

    def copy(self, to: Tensor, source: Tensor, start: int) -> None:
        """As ``to.copy_(source)``, whole blocks that lie from byte ``start`` on, and make their sums; see ``checksum_native``."""
        sums = self._sums.data_ptr() + start // BLOCK * self._sums.itemsize
        checksum_native.copy_and_add(source.data_ptr(), to.data_ptr(), sums, to.nbytes // BLOCK)

    def checksum(self, start: int, end: int) -> int:
        """That of the bytes from ``start`` to ``end``, whose blocks have their sums."""
        return _weighed(self._sums[start // BLOCK : end // BLOCK])


def _words(flat: Tensor) -> Tensor:
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
        self.pieces = list(pieces)

    def append(self, piece: Tensor) -> None:
        """One more piece, behind the others."""
        self.pieces.append(piece)

    def read(self, tensor: Tensor) -> None:
        """Contiguous memory of whole blocks, which stays as it is until ``of`` returns. A sum is either of such or of pieces."""
        self.append(tensor.detach().view(-1).view(torch.uint8))

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
    """Of a CPU's memory, one piece: a large tensor is copied bit by bit, and what was is added up in the same pass, or while the CPU's cache has
    it, by another thread where there are cores for it.

    ``written`` is told how many of the bytes are there for good, about every ``PIECE``.
    """

    def __init__(self, flat: Tensor, written: Callable[[int], None] | None = None) -> None:
        super().__init__(flat)
        self._blocks, self._written = BlockSums(flat), written
        self._adding: list[Future[None]] = []
        self._helper = _helper() if len(flat) > PIECE and len(_cores()) >= 3 * torch.get_num_threads() else None
        self._begun = 0

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        if to.nbytes < PIECE or not _alike(to, source):
            to.copy_(source)
            return
        one_pass = at % BLOCK == 0 and at >= self._begun and checksum_native.available()
        if one_pass:
            self._add(at)
        step = PIECE // to.itemsize
        for place, piece in zip(to.view(-1).split(step), source.view(-1).split(step), strict=True):
            if one_pass and place.nbytes % BLOCK == 0:
                self._blocks.copy(place, piece, at)
                self._there(at + place.nbytes)
            else:
                place.copy_(piece)
            at += place.nbytes
            self.up_to(at // BLOCK * BLOCK)

    def up_to(self, end: int) -> None:
        if end - self._begun >= PIECE:
            self._add(end)

    def of(self, end: int) -> int:
        self._add(end)
        for each in self._adding:
            each.result()
        return self._blocks.checksum(0, end)

    def _add(self, end: int) -> None:
        """Make the sums of what was copied before ``end``."""
        begun = self._begun
        self._there(end)
        if self._helper is None:
            self._blocks.add(begun, end)
        else:
            self._adding.append(self._helper.submit(self._blocks.add, begun, end))

    def _there(self, end: int) -> None:
        if end > self._begun and self._written is not None:
            self._written(end)
        self._begun = max(end, self._begun)


@cache
def _helper() -> ThreadPoolExecutor:
    """One thread beside the others."""
    return ThreadPoolExecutor(1, "checksum")


def _cores() -> set[int]:
    """Those this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class OnePass(Sum):
    """Of a GPU's memory, by its kernel: copies and adds up in one pass, a few launches for all of it, which ``of`` waits for."""

    def __init__(self, device: torch.device, *pieces: Tensor) -> None:
        super().__init__(*pieces)
        self._device = device
        self._total: Tensor | None = None  # made when it is needed: for the first launch, or never
        self._jobs: list[tuple[int, int, int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        self._small: tuple[list[Tensor], list[Tensor]] = [], []
        self._enough = FIRST_LAUNCH
        self._begun = self._piece = self._start = 0  # in blocks; the piece that this one is in, and where it starts
        self._read = 0  # bytes, since the last launch

    def read(self, tensor: Tensor) -> None:
        nbytes = tensor.nbytes
        self._jobs.append((tensor.data_ptr(), 0, self._begun, nbytes // BLOCK))
        self._begun += nbytes // BLOCK
        self._read += nbytes
        if self._read >= self._enough:
            self._read = 0
            self._launch()

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        first, nbytes = at // BLOCK, to.nbytes
        if stays and nbytes < BLOCK:
            self._small[0].append(to)
            self._small[1].append(source)
            return
        least = 0 if stays else PIECE  # a launch of its own takes longer than reading less once more
        if (
            first < self._begun
            or at % BLOCK
            or nbytes % BLOCK
            or nbytes <= least
            or not _alike(to, source)
            or not _aligned(to, source)
        ):
            to.copy_(source)
            return
        self._jobs.append((source.data_ptr(), to.data_ptr(), first, nbytes // BLOCK))
        self._copied.append((first, first + nbytes // BLOCK))
        if stays:
            self._kept += (to, source)
        else:
            self._run()

    def up_to(self, end: int) -> None:
        if end - self._begun * BLOCK >= self._enough:
            self._add(end // BLOCK)
            self._launch()

    def of(self, end: int) -> int:
        self._add(end // BLOCK)
        self._run()
        self._kept = []
        return 0 if self._total is None else int(self._total) % (1 << 64)

    def _add(self, end: int) -> None:
        """What was not copied of the blocks before this one is to be added up too."""
        copied, self._copied = deque(sorted(self._copied)), []
        while self._begun < end:
            piece = self.pieces[self._piece]
            behind = self._start + len(piece) // BLOCK
            if self._begun == behind:
                self._piece, self._start = self._piece + 1, behind
                continue
            last = min(behind, end)
            until, go_on = copied.popleft() if copied and copied[0][0] < last else (last, last)
            if self._begun < until:
                address = piece.data_ptr() + (self._begun - self._start) * BLOCK
                self._jobs.append((address, 0, self._begun, until - self._begun))
            self._begun = go_on

    def _launch(self) -> None:
        """As many jobs as a launch is to have wait; the next one is to have more."""
        self._enough = min(2 * self._enough, LAUNCH)
        self._run()

    def _run(self) -> None:
        """Make the jobs that wait."""
        from miles_core.sync import checksum_kernel  # needs Triton

        if self._small[0]:  # before the bytes of a copy are added up
            torch._foreach_copy_(*self._small)
            self._small = [], []
        jobs, self._jobs = self._jobs, []
        if jobs:
            if self._total is None:
                self._total = torch.zeros(1, dtype=torch.int64, device=self._device)
            with torch.cuda.device(self._device):
                checksum_kernel.run(jobs, self._total, BLOCK, _SPREAD)


def summing(*pieces: Tensor, written: Callable[[int], None] | None = None) -> Sum:
    """The fastest way to add up these bytes, which are one piece on a CPU. There ``written`` is told how many of them are there."""
    if usable(pieces[0]) and _aligned(*pieces):
        return OnePass(pieces[0].device, *pieces)
    return InCache(pieces[0], written) if pieces[0].device.type == "cpu" else Sum(*pieces)


def reading(first: Tensor) -> Sum:
    """The fastest way to add up what is ``read``, where the ``first`` of it is; all of it begins at multiples of ``ALIGNED``."""
    return OnePass(first.device) if usable(first.detach()) else Sum()


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
