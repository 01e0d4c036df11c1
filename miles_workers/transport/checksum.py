"""The checksum of memory, and copies that compute it in the same pass.

Memory is a sequence of signed 32-bit words in blocks of ``BLOCK`` bytes. The sum of a block is the sum of its words, each times the
multiplier of its position in the block; the checksum is the sum of the block sums, each times the weight of its block, modulo 2^64.
Multipliers are different odd numbers below 2^31. One changed bit therefore always changes the checksum, and so do two flipped bits at
the same bit position of two words of a block: 2^b (m - n) and 2^b (m + n) are not divisible by 2^64 for b < 32. Multipliers and weights
are pseudo-random, which detects exchanged words or blocks and repeating patterns. A word costs one multiply-add, which is faster than
reading it from memory.

A GPU with Triton copies and sums in one pass (``checksum_kernel``), as does a CPU with a C compiler (``checksum_native``). Otherwise
PyTorch sums pieces right after copying them, while they are in the CPU's cache. All implementations return the same number.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from miles_formats.gpu_kernel import runs_kernels
from miles_workers.transport import checksum_native
from miles_workers.transport.split_mix import pseudo_random

#: Bytes per block; sizes of pieces are multiples of it.
BLOCK = 1024
#: Bytes that a CPU copies before it sums them, which still fit in its cache.
PIECE = 2 << 20
#: Bytes of the first launch on a GPU, so that it starts early, and largest size of a launch. Sizes double in between, because a launch takes
#: the host as long as the GPU needs for some hundred megabytes.
FIRST_LAUNCH, LAUNCH = 128 << 20, 4 << 30
#: The number of cached block weights is rounded up to a multiple of this.
_ROUND = 1 << 15
#: Words per block, and number of multipliers; the weights of blocks continue the same pseudo-random sequence.
WORDS = BLOCK // 4
#: Bytes that PyTorch sums at once on a GPU, where it needs twice as much additional memory.
_GPU_PIECE = 64 << 20
#: Alignment in bytes for GPU copies, which move 16 bytes at a time.
ALIGNED = 16


#: [WORDS] int32 multiplier of each position in a block: odd, positive and pairwise different.
MULTIPLIERS = (pseudo_random(torch.arange(WORDS)) >> 33 & (1 << 31) - 1 | 1).int()


def checksum(*pieces: Tensor) -> int:
    """Return the checksum of bytes [n] uint8 on any device, n a multiple of ``BLOCK``; several pieces count as concatenated."""
    nbytes = sum(map(len, pieces))
    if runs_kernels(pieces[0]) and _aligned(*pieces):
        return KernelSum(pieces[0].device, *pieces).of(nbytes)
    sums = torch.empty(nbytes // BLOCK, dtype=torch.int64, device=pieces[0].device)
    at = 0
    for piece in pieces:
        blocks = len(piece) // BLOCK
        _add_blocks(piece, sums[at : at + blocks])
        at += blocks
    return _apply_weights(sums)


def _add_blocks(flat: Tensor, sums: Tensor) -> None:
    """Write the sum of each block of ``flat`` [n] uint8 to ``sums`` [n / BLOCK] int64."""
    if flat.device.type == "cpu" and checksum_native.available():
        checksum_native.add_blocks(flat.data_ptr(), 0, sums.data_ptr(), MULTIPLIERS.data_ptr(), len(sums))
        return
    multipliers = MULTIPLIERS.to(flat.device).long()
    step = (PIECE if flat.device.type == "cpu" else _GPU_PIECE) // BLOCK
    words = flat.view(torch.int32).view(-1, WORDS)
    for start in range(0, len(sums), step):
        torch.sum(words[start : start + step] * multipliers, 1, out=sums[start : start + step])


def checksum_of(tensor: Tensor) -> int | Tensor:
    """Return the checksum of a tensor's elements in order, independent of its strides. On a GPU this may be a tensor [1] int64, still
    being computed on the current stream, which holds the number modulo 2^64."""
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    if not len(flat):
        return 0
    end = (
        len(flat) // BLOCK * BLOCK if len(flat) > PIECE else 0
    )  # a small tensor is copied, which takes less time than a second piece
    pieces = [flat[:end]] if end else []
    if end < len(flat):
        last = flat.new_zeros(-(-(len(flat) - end) // BLOCK) * BLOCK)
        last[: len(flat) - end] = flat[end:]
        pieces.append(last)
    if runs_kernels(pieces[0]) and _aligned(*pieces):
        return KernelSum(flat.device, *pieces).launch(sum(map(len, pieces)))
    return checksum(*pieces)


def checksums_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of several tensors of one GPU with Triton as a tensor [n] int64, modulo 2^64, in a few launches on the current
    stream; each is that of ``checksum_of``."""
    from miles_workers.transport import checksum_kernel  # needs Triton

    device = tensors[0].device
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    whole = [tensor.detach().contiguous() for tensor in tensors]
    jobs, ends = [], []
    for number, tensor in enumerate(whole):
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        blocks = nbytes // BLOCK if address % ALIGNED == 0 else 0
        if blocks:
            jobs.append((address, 0, 0, blocks, number))
        if blocks * BLOCK < nbytes:
            ends.append((number, blocks, nbytes))
    if ends:  # what is no whole block is copied and filled up with zeros
        sizes = [-(-nbytes // BLOCK) - blocks for _, blocks, nbytes in ends]
        room = torch.zeros(sum(sizes) * BLOCK, dtype=torch.uint8, device=device)
        targets, sources, at = [], [], 0
        for (number, blocks, nbytes), size in zip(ends, sizes, strict=True):
            flat = whole[number].as_strided((whole[number].numel(),), (1,)).view(torch.uint8)
            sources.append(flat[blocks * BLOCK :])
            targets.append(room[at * BLOCK :][: nbytes - blocks * BLOCK])
            jobs.append((room.data_ptr() + at * BLOCK, 0, blocks, size, number))
            at += size
        torch._foreach_copy_(targets, sources)
    if jobs:
        with torch.cuda.device(device):
            checksum_kernel.run(jobs, totals, BLOCK)
    return totals


class BlockSums:
    """The block sums of ``flat`` [n] uint8, computed in any order; bytes after the last whole block are ignored."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat[: len(flat) // BLOCK * BLOCK]
        self._sums = torch.empty(len(self._flat) // BLOCK, dtype=torch.int64, device=flat.device)

    def add(self, start: int, end: int) -> None:
        """Compute the sums of bytes ``start`` to ``end``, multiples of ``BLOCK``."""
        _add_blocks(self._flat[start:end], self._sums[start // BLOCK : end // BLOCK])

    def copy(self, to: Tensor, source: Tensor, start: int) -> None:
        """Copy ``source`` to ``to``, whole blocks that start at byte ``start``, and compute their sums; see ``checksum_native``."""
        sums = self._sums.data_ptr() + start // BLOCK * self._sums.itemsize
        blocks = to.nbytes // BLOCK
        checksum_native.add_blocks(source.data_ptr(), to.data_ptr(), sums, MULTIPLIERS.data_ptr(), blocks)

    def checksum(self, start: int, end: int) -> int:
        """Return the checksum of bytes ``start`` to ``end``, whose block sums must have been computed."""
        return _apply_weights(self._sums[start // BLOCK : end // BLOCK])


def _apply_weights(sums: Tensor) -> int:
    """Return the checksum of blocks with these sums [blocks]."""
    return int((sums * _weights(-(-len(sums) // _ROUND) * _ROUND, sums.device)[: len(sums)]).sum()) % (1 << 64)


@lru_cache(4)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return the weights of ``count`` blocks: odd, pseudo-random."""
    return pseudo_random(torch.arange(WORDS, WORDS + count, device=device)) | 1


class Sum:
    """The checksum of concatenated pieces of memory that are written or read in order; this class computes it at the end."""

    def __init__(self, *pieces: Tensor) -> None:
        self.pieces = list(pieces)

    def append(self, piece: Tensor) -> None:
        """Append a piece."""
        self.pieces.append(piece)

    def read(self, tensor: Tensor) -> None:
        """Append contiguous memory of whole blocks, which must not change before ``of`` returns. Do not mix with pieces."""
        self.append(tensor.detach().view(-1).view(torch.uint8))

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        """Copy ``source`` to ``to``, one of which is at byte ``at`` of the memory. If ``source`` ``stays`` unchanged, the copy may be
        deferred until ``of``."""
        to.copy_(source)

    def up_to(self, end: int) -> None:
        """Declare the bytes before ``end``, a multiple of ``BLOCK``, as complete."""

    def of(self, end: int) -> int:
        """Return the checksum of all bytes before ``end``."""
        starts = accumulate(map(len, self.pieces), initial=0)
        return checksum(*(piece[: max(end - start, 0)] for start, piece in zip(starts, self.pieces, strict=False)))


class CpuSum(Sum):
    """The checksum of one piece of CPU memory. A large tensor is copied piece by piece; each piece is summed in the same pass, or while it
    is in the CPU's cache, by another thread if there are enough cores.
    """

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat)
        self._blocks = BlockSums(flat)
        self._adding: list[Future[None]] = []
        self._helper = _helper() if len(flat) > PIECE and len(_cores()) >= 3 * torch.get_num_threads() else None
        self._begun = 0

    def copy(self, to: Tensor, source: Tensor, at: int, stays: bool = False) -> None:
        if to.nbytes < PIECE or not _same_layout(to, source):
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
        """Compute the sums of the complete blocks before ``end``."""
        begun, self._begun = self._begun, max(end, self._begun)
        if self._helper is None:
            self._blocks.add(begun, end)
        else:
            self._adding.append(self._helper.submit(self._blocks.add, begun, end))


@cache
def _helper() -> ThreadPoolExecutor:
    """Return a pool with one additional thread."""
    return ThreadPoolExecutor(1, "checksum")


def _cores() -> set[int]:
    """Return the cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class KernelSum(Sum):
    """The checksum of GPU memory: a kernel copies and sums in one pass, with a few launches in total; ``of`` synchronises."""

    def __init__(self, device: torch.device, *pieces: Tensor) -> None:
        super().__init__(*pieces)
        self._device = device
        self._total: Tensor | None = None  # allocated at the first launch
        self._jobs: list[tuple[int, int, int, int, int]] = []
        self._copied: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        self._small: tuple[list[Tensor], list[Tensor]] = [], []
        self._enough = FIRST_LAUNCH
        self._begun = self._piece = self._start = 0  # next block to sum; its piece, and the first block of that piece
        self._read = 0  # bytes since the last launch

    def read(self, tensor: Tensor) -> None:
        nbytes = tensor.nbytes
        self._jobs.append((tensor.data_ptr(), 0, self._begun, nbytes // BLOCK, 0))
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
        least = 0 if stays else PIECE  # for smaller copies a launch takes longer than reading the bytes again
        if (
            first < self._begun
            or at % BLOCK
            or nbytes % BLOCK
            or nbytes <= least
            or not _same_layout(to, source)
            or not _aligned(to, source)
        ):
            to.copy_(source)
            return
        self._jobs.append((source.data_ptr(), to.data_ptr(), first, nbytes // BLOCK, 0))
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
        return int(self.launch(end)) % (1 << 64)

    def launch(self, end: int) -> Tensor:
        """Launch what remains up to byte ``end``; return the checksum as a tensor [1] int64, modulo 2^64, without synchronising."""
        self._add(end // BLOCK)
        self._run()
        self._kept = []
        return torch.zeros(1, dtype=torch.int64) if self._total is None else self._total

    def _add(self, end: int) -> None:
        """Queue the blocks before ``end`` that no copy summed."""
        copied, self._copied = deque(sorted(self._copied)), []
        while self._begun < end:
            piece = self.pieces[self._piece]
            piece_end = self._start + len(piece) // BLOCK
            if self._begun == piece_end:
                self._piece, self._start = self._piece + 1, piece_end
                continue
            last = min(piece_end, end)
            until, go_on = copied.popleft() if copied and copied[0][0] < last else (last, last)
            if self._begun < until:
                address = piece.data_ptr() + (self._begun - self._start) * BLOCK
                self._jobs.append((address, 0, self._begun, until - self._begun, 0))
            self._begun = go_on

    def _launch(self) -> None:
        """Launch the queued jobs, and double the size of the next launch."""
        self._enough = min(2 * self._enough, LAUNCH)
        self._run()

    def _run(self) -> None:
        """Run the queued jobs."""
        from miles_workers.transport import checksum_kernel  # needs Triton

        if self._small[0]:  # copy before the bytes are summed
            torch._foreach_copy_(*self._small)
            self._small = [], []
        jobs, self._jobs = self._jobs, []
        if jobs:
            if self._total is None:
                self._total = torch.zeros(1, dtype=torch.int64, device=self._device)
            with torch.cuda.device(self._device):
                checksum_kernel.run(jobs, self._total, BLOCK)


def make_sum(*pieces: Tensor) -> Sum:
    """Make the fastest ``Sum`` for these bytes; on a CPU they must be one piece."""
    if runs_kernels(pieces[0]) and _aligned(*pieces):
        return KernelSum(pieces[0].device, *pieces)
    return CpuSum(pieces[0]) if pieces[0].device.type == "cpu" else Sum(*pieces)


def make_read_sum(first: Tensor) -> Sum:
    """Make the fastest ``Sum`` for memory passed to ``read``, all of it aligned to ``ALIGNED`` and on the device of ``first``."""
    return KernelSum(first.device) if runs_kernels(first.detach()) else Sum()


def _same_layout(to: Tensor, source: Tensor) -> bool:
    """Whether a copy would move all bytes unchanged and in order."""
    return (
        to.dtype == source.dtype
        and to.device == source.device
        and to.shape == source.shape
        and to.is_contiguous()
        and source.is_contiguous()
    )


def _aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % ALIGNED == 0 for t in tensors)
