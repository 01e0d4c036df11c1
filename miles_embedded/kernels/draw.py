"""Samples the next token of each row (``engine.sampling``), and advances the batch to its next step. One program per row reads the logits
twice: for the maximum and the sum of exponentials, and for the probability mass of each block. It then reads one block again to find the
first token at which the cumulative mass exceeds the random number. Masses are float64, as in ``sampling.pick``, and the random number is
that of ``sampling.uniform``.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_embedded.kernels.blocks import cdiv, next_power_of_2
from miles_embedded.kernels.overlap import overlap, release, wait

_BLOCK = 4096


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    # SplitMix64's finaliser; >> is arithmetic on int64, the masks make it logical
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# fmt: off
@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits, temperatures, greedy, keys, prompt_lengths, tokens, lengths, results,
    start, vocab, logits_row, results_row,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):
    release(OVERLAP)
    wait(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source, temperature, length = logits + row * logits_row, tl.load(temperatures + row), tl.load(lengths + row)
    highest, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        real = first + column < vocab
        x = tl.load(source + first + column, mask=real, other=-float("inf")).to(tl.float32) / temperature
        now = tl.where(x > highest, x, highest)  # never NaN
        shift = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp(highest - shift) + tl.exp(x - shift)  # NaN where x is
        highest = now
    top = tl.max(highest, 0)
    level = tl.where(top == -float("inf"), 0.0, top)
    log_total = tl.log(tl.sum(total * tl.exp(highest - level), 0))

    place, masses, best = tl.arange(0, BLOCKS), tl.zeros([BLOCKS], tl.float64), tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for first in range(0, vocab, BLOCK):
        real = first + column < vocab
        x = tl.load(source + first + column, mask=real, other=-float("inf")).to(tl.float32) / temperature
        mass = tl.sum(tl.exp(x - level - log_total).to(tl.float64), 0)
        masses = tl.where(place == first // BLOCK, mass, masses)
        best = tl.minimum(best, tl.where(real & (x == top), first + column, 0x7FFFFFFF))

    state = _mix(tl.load(keys + row) * -7046029254386353131 + start)
    state = _mix(state + (tl.load(prompt_lengths + row) + length + 1) * -7046029254386353131)
    share = (((state >> 16) & 0xFFFFFFFFFFFF).to(tl.float64) + 0.5) * 3.552713678800501e-15  # 2**-48
    target = share * tl.sum(masses, 0)
    # Sums in another order differ in their last places: if no block or token exceeds the target, take the last one.
    block = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0), place, BLOCKS), 0)
    block = tl.where(block == BLOCKS, tl.max(tl.where(masses > 0, place, 0), 0), block)
    at = block * BLOCK + column
    x = tl.load(source + at, mask=at < vocab, other=-float("inf")).to(tl.float32) / temperature
    part = tl.exp(x - level - log_total).to(tl.float64)
    reached = (tl.sum(tl.where(place < block, masses, 0.0), 0) + tl.cumsum(part, 0) > target) & (part > 0)
    token = tl.min(tl.where(reached, at, 0x7FFFFFFF), 0)
    token = tl.where(token == 0x7FFFFFFF, tl.max(tl.where(part > 0, at, -1), 0), token)
    token = tl.where(tl.load(greedy + row) != 0, tl.min(best, 0), token)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)  # logits that are not finite
    log_prob = tl.load(source + token).to(tl.float32) / temperature - level - log_total
    tl.store(results + row, token.to(tl.float64))
    tl.store(results + results_row + row, log_prob.to(tl.float64))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(lengths + row, length + 1)

# fmt: on


class Batch(Protocol):
    """The rows and the inputs of the next step; see ``engine.static_batch``."""

    temperature: Tensor
    greedy: Tensor
    keys: Tensor
    prompt_lengths: Tensor
    tokens: Tensor
    lengths: Tensor
    results: Tensor


def draw_rows(logits: Tensor, batch: Batch, start: int) -> None:
    """Sample a token for each row of ``logits`` and store it as input of the next step.

    Args:
        logits: [rows, vocab], untruncated.
        batch: its first rows; ``results`` [2, size], ``tokens`` and ``lengths`` are written. A log-probability is NaN where logits are not
            finite.
        start: ``sampling.stream_start`` of the run's seed.
    """
    rows, vocab = logits.shape
    block = min(_BLOCK, max(16, next_power_of_2(vocab)))
    fixed = (batch.temperature, batch.greedy, batch.keys, batch.prompt_lengths)
    moved = (batch.tokens, batch.lengths, batch.results)
    strides = (logits.stride(0), batch.results.stride(0))
    options = overlap(logits) | {"num_warps": 8 if block > 1024 else 4}
    blocks = next_power_of_2(max(2, cdiv(vocab, block)))
    _draw[(rows,)](logits, *fixed, *moved, start, vocab, *strides, BLOCK=block, BLOCKS=blocks, **options)


def can_draw(logits: Tensor) -> bool:
    """Whether ``draw_rows`` takes these."""
    return logits.is_cuda and logits.stride(1) == 1 and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
