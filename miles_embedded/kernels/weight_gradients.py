"""Gradients of the weights of experts: for each expert the transposed gradients of its rows times the rows.

torch's grouped product divides these sums over few rows and large results less well. Whole blocks of rows are copied by Hopper's tensor memory
accelerator (TMA); the last block of an expert is read with a mask, because the rows of the next expert follow.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from miles_embedded.kernels.blocks import cdiv

#: Entries of a block of the result, rows that are multiplied at a time, warps and pipeline stages of a program.
LEFT, RIGHT, ROWS, WARPS, STAGES = 128, 256, 64, 8, 3


# fmt: off
@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    left_blocks, right_blocks, left, right, ends, out, width, depth,
    ADD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr,
):
    beside, expert = tl.cdiv(depth, RIGHT), tl.program_id(1)
    at, to = tl.program_id(0) // beside * LEFT, tl.program_id(0) % beside * RIGHT
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    whole = first + (last - first) // ROWS * ROWS
    column, entry = at + tl.arange(0, LEFT), to + tl.arange(0, RIGHT)
    total = tl.zeros([LEFT, RIGHT], tl.float32)
    for start in range(first, whole, ROWS):
        total = tl.dot(left_blocks.load([start, at]).T, right_blocks.load([start, to]), total)
    if whole < last:
        row = (whole + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        a = tl.load(left + row * width + column[None, :], mask=(row < last) & (column < width)[None, :], other=0.0)
        b = tl.load(right + row * depth + entry[None, :], mask=(row < last) & (entry < depth)[None, :], other=0.0)
        total = tl.dot(a.T, b, total)
    place = out + expert.to(tl.int64) * width * depth + column[:, None] * depth + entry[None, :]
    real = (column < width)[:, None] & (entry < depth)[None, :]
    if ADD:
        total += tl.load(place, mask=real, other=0.0)
    tl.store(place, total, mask=real)

# fmt: on


def weight_gradients(left: Tensor, right: Tensor, ends: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Compute ``left[rows].T @ right[rows]`` for the rows of each expert.

    Args:
        left: [places, N] bfloat16, sorted by expert; N a multiple of 8.
        right: [places, K] likewise.
        ends: [experts] int32, end of each expert's places.
        out: [experts, N, K] float32, contiguous; None allocates the result in bfloat16.
        add: add to ``out`` instead of overwriting it.

    Returns:
        [experts, N, K].
    """
    left, right = left.contiguous(), right.contiguous()
    (places, width), depth, experts = left.shape, right.shape[1], len(ends)
    if out is None:
        out = left.new_empty(experts, width, depth)
    if not places:
        return out if add else out.zero_()
    left_blocks = TensorDescriptor(left, [places, width], [width, 1], [ROWS, LEFT])
    right_blocks = TensorDescriptor(right, [places, depth], [depth, 1], [ROWS, RIGHT])
    options = {"ADD": add, "LEFT": LEFT, "RIGHT": RIGHT, "ROWS": ROWS, "num_warps": WARPS, "num_stages": STAGES}
    grid = cdiv(width, LEFT) * cdiv(depth, RIGHT), experts
    _multiply[grid](left_blocks, right_blocks, left, right, ends, out, width, depth, **options)
    return out


@cache
def computes_gradients(device: torch.device) -> bool:
    """Whether the kernel runs on a device, where it was compared with torch's: a GPU of the generation Hopper."""
    return torch.cuda.get_device_capability(device)[0] == 9
