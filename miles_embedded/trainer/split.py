"""Split the samples of an optimizer step into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from miles_core.data.batch import Batch, Ragged
from miles_embedded.trainer.packing import row_counts


def split(
    batch: Batch, micro_batch_size: int | None = None, max_tokens: int | None = None, share: bool = True
) -> list[list[int]]:
    """Return the sample indices of each micro-batch; every sample is in exactly one.

    Args:
        batch: all samples of the step.
        micro_batch_size: samples per micro-batch, in order; None for no limit.
        max_tokens: if given, computed tokens per micro-batch, instead of ``micro_batch_size``. A group is kept together if it fits, so
            that its prompt is computed once; a sample longer than the limit has its own micro-batch.
        share: whether prompts are shared, which determines the cost of a sample.
    """
    everything = list(range(len(batch)))
    if max_tokens is None:
        size = micro_batch_size or max(len(batch), 1)
        return [everything[i : i + size] for i in range(0, len(batch), size)]
    pieces = [p for members, trunk, own in row_counts(batch, share) for p in _pieces(members, trunk, own, max_tokens)]
    found = _fill(pieces, max_tokens)
    idle = sorted(set(everything) - {i for samples in found for i in samples})
    if idle:  # samples that train nothing cost nothing, but callers expect results for them
        found = [[*found[0], *idle], *found[1:]] if found else [idle]
    return found


def idle_sample(batch: Batch) -> Batch:
    """Return a sample with every column of ``batch`` that trains nothing: the first sample, or two zero tokens if there is none."""
    if len(batch):
        one = batch.select([0])
        return replace(one, columns=one.columns | {"loss_mask": torch.zeros_like(one.mask)})

    def rows(column: Tensor | Ragged) -> Tensor | Ragged:
        if isinstance(column, Ragged):
            return Ragged(column.values, column.offsets.new_zeros(3))
        return column.new_zeros(2, *column.shape[1:])

    number = batch.lengths.new_zeros(1)
    return replace(
        batch,
        tokens=batch.tokens.new_zeros(2),
        lengths=number + 2,
        prompt_lengths=number + 1,
        group=number,
        rollout=number,
        index=number,
        columns={name: rows(column) for name, column in batch.columns.items()},
        scalars={name: value.new_zeros(1, *value.shape[1:]) for name, value in batch.scalars.items()},
    )


def _pieces(members: list[int], trunk: int, own: list[int], limit: int) -> list[tuple[int, list[int]]]:
    """Split a group into parts of at most ``limit`` rows, each including the trunk: (rows, samples)."""
    pieces: list[tuple[int, list[int]]] = []
    for sample, rows in zip(members, own, strict=True):
        if pieces and pieces[-1][0] + rows <= limit:
            cost, samples = pieces[-1]
            pieces[-1] = (cost + rows, [*samples, sample])
        else:
            pieces.append((trunk + rows, [sample]))
    return pieces


def _fill(pieces: list[tuple[int, list[int]]], limit: int) -> list[list[int]]:
    """Assign pieces by first fit, largest first, to few micro-batches; samples stay in order within each."""
    bins: list[tuple[int, list[int]]] = []
    for cost, samples in sorted(pieces, key=lambda p: (-p[0], p[1][0])):
        for i, (used, held) in enumerate(bins):
            if used + cost <= limit:
                bins[i] = (used + cost, [*held, *samples])
                break
        else:
            bins.append((cost, list(samples)))
    return [sorted(samples) for _, samples in bins]
