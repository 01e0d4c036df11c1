"""One pass of a GPU over many pieces of memory: copies them and adds them up, as a Triton kernel.

A plain copy reads and writes every byte once, and so does this one: the sum costs no traffic of its own. It is as fast as the memory
however many pieces there are, because all of them are one launch: a table says where each one lies.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_transport.checksum import GOLDEN, MIX_A, MIX_B

#: Blocks of a row of the table, which are shared out among programs, and those of one program.
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
    job = table + tl.program_id(0) * 4
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
            total, tl.sum(sums * (_pseudo_random(WORDS + first + row, GOLDEN, MIX_A, MIX_B) | 1)), sem="relaxed"
        )


#: Addresses of a piece of memory and of the place to copy it to, or 0, the number of its first block, and how many they are.
Job = tuple[int, int, int, int]


def run(jobs: list[Job], total: Tensor, block: int) -> None:
    """Copy, and add up.

    Args:
        jobs: addresses are multiples of 16.
        total: [1] int64 on the GPU, to which the sums of the blocks are added, each times its weight (``checksum``).
        block: bytes of a block.
    """
    stream = torch.cuda.current_stream(total.device).cuda_stream if total.is_cuda else 0
    table = _table(tuple(jobs), block, total.device, stream)
    grid = len(table), CHUNK // TILE
    _pass[grid](table, total, WORDS=block // 4, TILE=TILE, GOLDEN=GOLDEN, MIX_A=MIX_A, MIX_B=MIX_B, num_warps=WARPS)


@lru_cache(64)
def _table(jobs: tuple[Job, ...], block: int, device: torch.device, stream: int) -> Tensor:
    """The jobs on a GPU, for launches of a ``stream``. Weights lie where they lay at the last sync, as a rule, and to make and move a table
    takes the host longer than the launch."""
    rows = torch.from_numpy(_rows(np.array(jobs, np.int64), block))
    if device.type == "cuda":
        rows = rows.pin_memory()  # copied from other memory it would wait for the launch before
    return rows.to(device, non_blocking=True)


def _rows(jobs: np.ndarray, block: int) -> np.ndarray:
    """The jobs [n, 4], divided into such of no more than ``CHUNK`` blocks."""
    counts = -(-jobs[:, 3] // CHUNK)
    rows = np.repeat(jobs, counts, axis=0)
    before = CHUNK * (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts))
    rows[:, 0] += before * block
    rows[:, 1] += np.where(rows[:, 1] != 0, before * block, 0)
    rows[:, 2] += before
    rows[:, 3] = np.minimum(rows[:, 3] - before, CHUNK)
    return rows
