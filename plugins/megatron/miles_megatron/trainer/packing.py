"""Packs the samples of a micro-batch into one row of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.data import Batch
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.attention import zigzag


@dataclass(frozen=True)
class Packing:
    """Layout of one micro-batch's tokens on one rank.

    Attributes:
        rows: [tokens of this context-parallel rank] flat position of each row in the micro-batch; -1 for padding.
        positions: [tokens of this context-parallel rank] position of each row in its sample.
        bounds: [samples + 1] int32 start of each sample in the packed row over all ranks.
        longest: tokens of the longest sample, including padding.
        sources: [M] rows on this rank that predict a trained token.
        targets: [M] flat positions of these tokens.
    """

    rows: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int
    sources: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Packing:
        """Return a copy on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Packing(**{**vars(self), **moved})


def pack(batch: Batch, s: Sizes, rank: int, multiple: int = 1, least: int = 0) -> Packing:
    """Lay out a micro-batch.

    Samples are concatenated. Each is padded so that context parallelism can split it into pairs of pieces; padding at the end allows
    sequence parallelism to split the row. A micro-batch without tokens becomes a row of padding.

    Args:
        batch: the micro-batch, on the CPU.
        s: parallel sizes.
        rank: this context-parallel rank.
        multiple: pad each rank's row to a multiple of this many tokens.
        least: minimum tokens of the packed row over all ranks.
    """
    piece = 2 * s.cp if s.cp > 1 else 1
    lengths = [n + -n % piece for n in batch.lengths.tolist()]
    rest = row_length(batch, s, multiple, least) - sum(lengths)
    if rest:
        lengths.append(rest)
    rows, positions = [], []
    for i, length in enumerate(lengths):
        at = zigzag(length // s.cp, rank, s.cp)
        real = int(batch.lengths[i]) if i < len(batch) else 0
        start = int(batch.starts[i]) if i < len(batch) else 0
        positions.append(at)
        rows.append(torch.where(at < real, start + at, -1))
    flat = torch.cat(rows)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sources, targets = _predictions(batch, flat)
    return Packing(flat, torch.cat(positions), bounds, max(lengths), sources, targets)


def row_length(batch: Batch, s: Sizes, multiple: int = 1, least: int = 0) -> int:
    """Return the tokens of the packed row over all ranks, including padding."""
    piece, ranks = 2 * s.cp if s.cp > 1 else 1, s.cp * (s.tp if s.sequence else 1)
    unit = math.lcm(piece, ranks * multiple if s.sequence or multiple > 1 else 1)
    needed = max(sum(n + -n % piece for n in batch.lengths.tolist()), least, 1)
    return needed + -needed % unit


def _predictions(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows whose next token is trained on, and the flat positions of these tokens."""
    trained = torch.cat([batch.mask.cpu() != 0, torch.zeros(1, dtype=torch.bool)])
    if bool(trained.index_select(0, batch.starts).any()):
        raise ValueError("loss_mask is 1 on the first token of a sample, which has no previous token to predict it")
    following = torch.where(rows < 0, len(trained) - 1, rows + 1)
    sources = trained.index_select(0, following).nonzero().flatten()
    return sources, following.index_select(0, sources)


def split(batch: Batch, size: int | None, tokens: int | None) -> Iterator[list[int]]:
    """Yield the sample indices of each micro-batch: ``size`` samples, or as many as fit into ``tokens``; all if both are None."""
    lengths = batch.lengths.tolist()
    if tokens is None:
        size = size or len(batch) or 1
        yield from (list(range(at, min(at + size, len(batch)))) for at in range(0, len(batch), size))
        return
    current: list[int] = []
    filled = 0
    for i in sorted(range(len(batch)), key=lambda i: (-lengths[i], i)):
        if current and filled + lengths[i] > tokens:
            yield sorted(current)
            current, filled = [], 0
        current.append(i)
        filled += lengths[i]
    if current:
        yield sorted(current)
