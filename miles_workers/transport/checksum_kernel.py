"""A Triton kernel that copies and sums many pieces of GPU memory in one pass.

Like a plain copy it reads and writes every byte once; the sum needs no additional memory traffic. It reaches the memory bandwidth for any
number of pieces, because one launch processes all of them from a table of their addresses.
"""

# Do not postpone annotations in this file: Triton evaluates the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_workers.transport.split_mix import GOLDEN, MIX_A, MIX_B

#: Blocks per row of the table, which several programs share, and blocks per program.
CHUNK, TILE = 1024, 64
WARPS = 8


@triton.jit
def _pseudo_random(numbers, GOLDEN: tl.constexpr, MIX_A: tl.constexpr, MIX_B: tl.constexpr):
    x = (numbers + 1) * GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_A  # >> is arithmetic; the masks make it logical
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _pass(
    table,
    total,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    GOLDEN: tl.constexpr,
    MIX_A: tl.constexpr,
    MIX_B: tl.constexpr,
):
    job = table + tl.program_id(0) * 5
    first, blocks = tl.load(job + 2), tl.load(job + 3)
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    if tl.program_id(1) * TILE < blocks:
        source = tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.int32)), 16)
        to = tl.load(job + 1)
        place = tl.arange(0, WORDS)[None, :]
        at = row * WORDS + place
        words = tl.load(source + at, mask=row < blocks, other=0)
        if to != 0:
            tl.store(tl.multiple_of(to.to(tl.pointer_type(tl.int32)), 16) + at, words, mask=row < blocks)
        multipliers = ((_pseudo_random(place.to(tl.int64), GOLDEN, MIX_A, MIX_B) >> 33) & 0x7FFFFFFF) | 1
        sums = tl.sum(words.to(tl.int64) * multipliers, axis=1, keep_dims=True)
        tl.atomic_add(
            total + tl.load(job + 4),
            tl.sum(sums * (_pseudo_random(WORDS + first + row, GOLDEN, MIX_A, MIX_B) | 1)),
            sem="relaxed",
        )


#: Address of a piece of memory, address to copy it to or 0, index of its first block, number of blocks, and index of its total.
Job = tuple[int, int, int, int, int]


def run(jobs: list[Job], total: Tensor, block: int) -> None:
    """Copy and sum pieces of memory.

    Args:
        jobs: the pieces; addresses are multiples of 16.
        total: [n] int64 on the GPU, to which the weighted block sums are added (``checksum``).
        block: bytes per block.
    """
    stream = torch.cuda.current_stream(total.device).cuda_stream if total.is_cuda else 0
    table = _table(tuple(jobs), block, total.device, stream)
    grid = len(table), CHUNK // TILE
    _pass[grid](table, total, WORDS=block // 4, TILE=TILE, GOLDEN=GOLDEN, MIX_A=MIX_A, MIX_B=MIX_B, num_warps=WARPS)


@lru_cache(64)
def _table(jobs: tuple[Job, ...], block: int, device: torch.device, stream: int) -> Tensor:
    """Return the jobs as a table on a GPU, cached per ``stream``. Addresses rarely change between syncs, and creating and copying a table
    takes the host longer than the launch."""
    rows = torch.from_numpy(_rows(np.array(jobs, np.int64), block))
    if device.type == "cuda":
        rows = rows.pin_memory()  # a copy from pageable memory would wait for the previous launch
    return rows.to(device, non_blocking=True)


def _rows(jobs: np.ndarray, block: int) -> np.ndarray:
    """Split the jobs [n, 5] into jobs of at most ``CHUNK`` blocks."""
    counts = -(-jobs[:, 3] // CHUNK)
    rows = np.repeat(jobs, counts, axis=0)
    before = CHUNK * (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts))
    rows[:, 0] += before * block
    rows[:, 1] += np.where(rows[:, 1] != 0, before * block, 0)
    rows[:, 2] += before
    rows[:, 3] = np.minimum(rows[:, 3] - before, CHUNK)
    return rows
