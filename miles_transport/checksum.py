"""The checksum of memory, and copies that compute it on the way.

Memory is a sequence of signed 32-bit words in blocks of ``BLOCK`` bytes. The sum of a block is the sum of its words, each times
the multiplier of its place in the block; the checksum is the sum of the block sums, each times the weight of its block, modulo 2^64.
Multipliers are different odd numbers below 2^31, so one changed bit always changes the checksum, and so do two flipped bits
in the same place of two words of a block: 2^b (m - n) and 2^b (m + n) are not divisible by 2^64 for b < 32. Multipliers and weights
are pseudo-random, which finds words or blocks that changed places and patterns that repeat. A word costs one multiply-add, and
memory is slower than that.

A GPU with Triton copies and adds up in one pass (``checksum_kernel``), and so does a CPU with a C compiler (``checksum_native``).
Otherwise PyTorch adds up pieces that were just copied and are still in the CPU's cache. All of them return the same number.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from miles_core.precision.gpu_kernel import usable
from miles_transport import checksum_native

#: Bytes a checksum adds up at a time; pieces of memory are multiples of it.
BLOCK = 1024
#: Bytes that a CPU copies before it adds them up: they are in its cache still.
PIECE = 2 << 20
#: Bytes that a GPU is given first to copy or add up, so that it is busy while the next ones are found, and at most; twice as many each time, as
#: a launch takes the host as long as some hundred megabytes take the GPU.
FIRST_LAUNCH, LAUNCH = 128 << 20, 4 << 30
#: Blocks whose numbers are made together.
_ROUND = 1 << 15
#: Steps and factors of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
GOLDEN, MIX_A, MIX_B = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: Words of a block, which number the multipliers; weights of blocks are numbered after them.
WORDS = BLOCK // 4
#: Bytes that PyTorch adds up at a time on a GPU: it needs twice as many beside them.
_GPU_PIECE = 64 << 20
#: What a GPU copies 16 bytes at a time has to begin at a multiple of them.
ALIGNED = 16


def pseudo_random(numbers: Tensor) -> Tensor:
    """SplitMix64's output for each of these numbers, int64."""
    x = (numbers + 1) * GOLDEN
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX_A  # >> is arithmetic; the masks make it logical
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX_B
    return x ^ (x >> 31 & (1 << 33) - 1)


#: [WORDS] int32 of each place in a block, odd, positive and different from each other.
MULTIPLIERS = (pseudo_random(torch.arange(WORDS)) >> 33 & (1 << 31) - 1 | 1).int()


def checksum(*pieces: Tensor) -> int:
    """The checksum of bytes [n] uint8 on any device, n a multiple of ``BLOCK``; several pieces count as one."""
    nbytes = sum(map(len, pieces))
    if usable(pieces[0]) and _aligned(*pieces):
        return OnePass(pieces[0].device, *pieces).of(nbytes)
    sums = torch.empty(nbytes // BLOCK, dtype=torch.int64, device=pieces[0].device)
    at = 0
    for piece in pieces:
        blocks = len(piece) // BLOCK
        _add_blocks(piece, sums[at : at + blocks])
        at += blocks
    return _weighed(sums)


def _add_blocks(flat: Tensor, sums: Tensor) -> None:
    """Write the sum of each block of ``flat`` [n] uint8 into ``sums`` [n / BLOCK] int64."""
    if flat.device.type == "cpu" and checksum_native.available():
        checksum_native.add_blocks(flat.data_ptr(), 0, sums.data_ptr(), MULTIPLIERS.data_ptr(), len(sums))
        return
    multipliers = MULTIPLIERS.to(flat.device).long()
    step = (PIECE if flat.device.type == "cpu" else _GPU_PIECE) // BLOCK
    words = flat.view(torch.int32).view(-1, WORDS)
    for start in range(0, len(sums), step):
        torch.sum(words[start : start + step] * multipliers, 1, out=sums[start : start + step])


class BlockSums:
    """The sums of the blocks of ``flat`` [n] uint8, made in any order; what is behind the last whole block does not count."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat[: len(flat) // BLOCK * BLOCK]
        self._sums = torch.empty(len(self._flat) // BLOCK, dtype=torch.int64, device=flat.device)

    def add(self, start: int, end: int) -> None:
        """Make those of the bytes from ``start`` to ``end``, multiples of ``BLOCK``."""
        _add_blocks(self._flat[start:end], self._sums[start // BLOCK : end // BLOCK])

    def copy(self, to: Tensor, source: Tensor, start: int) -> None:
        """As ``to.copy_(source)``, whole blocks that lie from byte ``start`` on, and make their sums; see ``checksum_native``."""
        sums = self._sums.data_ptr() + start // BLOCK * self._sums.itemsize
        blocks = to.nbytes // BLOCK
        checksum_native.add_blocks(source.data_ptr(), to.data_ptr(), sums, MULTIPLIERS.data_ptr(), blocks)

    def checksum(self, start: int, end: int) -> int:
        """That of the bytes from ``start`` to ``end``, whose blocks have their sums."""
        return _weighed(self._sums[start // BLOCK : end // BLOCK])


def _weighed(sums: Tensor) -> int:
    """The checksum of blocks with these sums [blocks]."""
    return int((sums * _weights(-(-len(sums) // _ROUND) * _ROUND, sums.device)[: len(sums)]).sum()) % (1 << 64)


@lru_cache(4)
def _weights(count: int, device: torch.device) -> Tensor:
    """The weights of so many blocks: odd, pseudo-random."""
    return pseudo_random(torch.arange(WORDS, WORDS + count, device=device)) | 1


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
    """

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat)
        self._blocks = BlockSums(flat)
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
                self._begun = at + place.nbytes
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
        begun, self._begun = self._begun, max(end, self._begun)
        if self._helper is None:
            self._blocks.add(begun, end)
        else:
            self._adding.append(self._helper.submit(self._blocks.add, begun, end))


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
        from miles_transport import checksum_kernel  # needs Triton

        if self._small[0]:  # before the bytes of a copy are added up
            torch._foreach_copy_(*self._small)
            self._small = [], []
        jobs, self._jobs = self._jobs, []
        if jobs:
            if self._total is None:
                self._total = torch.zeros(1, dtype=torch.int64, device=self._device)
            with torch.cuda.device(self._device):
                checksum_kernel.run(jobs, self._total, BLOCK)


def summing(*pieces: Tensor) -> Sum:
    """The fastest way to add up these bytes, which are one piece on a CPU."""
    if usable(pieces[0]) and _aligned(*pieces):
        return OnePass(pieces[0].device, *pieces)
    return InCache(pieces[0]) if pieces[0].device.type == "cpu" else Sum(*pieces)


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
