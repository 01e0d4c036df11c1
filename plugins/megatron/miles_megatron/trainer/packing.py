"""Micro-batches: which samples, and where their tokens are in the row that the model is given."""

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
    """The tokens of one micro-batch on one rank.

    Attributes:
        rows: [tokens of this context-parallel rank] flat position in the micro-batch of each row, -1 for padding.
        positions: [the same] its place in its sample.
        bounds: [samples + 1] int32 where samples start in the row of all ranks.
        longest: tokens of the longest sample, padding included.
        sources: [M] rows here that predict a trained token.
        targets: [M] the flat positions of these tokens.
    """

    rows: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int
    sources: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Packing:
        """The same on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Packing(**{**vars(self), **moved})


def pack(batch: Batch, s: Sizes, rank: int, multiple: int = 1, least: int = 0) -> Packing:
    """Lay out a micro-batch.

    Samples follow each other, each padded so that context parallelism can cut it into pairs of pieces, the last one so that
    sequence parallelism can cut the row. A micro-batch without tokens becomes a row of padding.

    Args:
        batch: the micro-batch, on the CPU.
        s: parallel sizes.
        rank: this context-parallel rank.
        multiple: tokens of a rank's row are a multiple of it.
        least: tokens that the row of all ranks has at least.
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
    """Tokens of a micro-batch's row on all ranks together, padding included."""
    piece, ranks = 2 * s.cp if s.cp > 1 else 1, s.cp * (s.tp if s.sequence else 1)
    unit = math.lcm(piece, ranks * multiple if s.sequence or multiple > 1 else 1)
    needed = max(sum(n + -n % piece for n in batch.lengths.tolist()), least, 1)
    return needed + -needed % unit


def _predictions(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose next token is trained on, and that token's flat position."""
    trained = torch.cat([batch.mask.cpu() != 0, torch.zeros(1, dtype=torch.bool)])
    if bool(trained.index_select(0, batch.starts).any()):
        raise ValueError("loss_mask is 1 on the first token of a sample, which nothing predicts")
    following = torch.where(rows < 0, len(trained) - 1, rows + 1)
    sources = trained.index_select(0, following).nonzero().flatten()
    return sources, following.index_select(0, sources)


def split(batch: Batch, size: int | None, tokens: int | None) -> Iterator[list[int]]:
    """The samples of each micro-batch: ``size`` of them, or as many as have ``tokens`` together; none when both are None."""
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
