"""Reductions over flat columns: the tokens of all samples concatenated, ``lengths [samples]`` saying where one ends.

Index t of a sample refers to token t as *target* (prompt tokens are there, with mask 0). Sums run in float64 and in a
fixed order inside each sample, so a value does not depend on which other samples share the batch or the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [tokens]`` over each sample: [samples], float64; an empty sample gives 0. Differentiable."""
    if len(lengths) == 0:  # segment_reduce refuses this case
        return values.double()[:0]
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0)


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat ``values [samples]`` on every token of its sample: [tokens]."""
    return torch.repeat_interleave(values, lengths)


def mask_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """The number of unmasked tokens of each sample: [samples], int64."""
    return segment_sum(mask.bool().double(), lengths).round().long()


class Unmasked:
    """The unmasked tokens of every sample as rows of a matrix [samples, longest], and back.

    What must run along time skips masked tokens (tool text between two turns) instead of stepping over them.
    """

    def __init__(self, mask: Tensor, lengths: Tensor) -> None:
        self.mask = mask.bool()
        self.counts = mask_counts(mask, lengths)
        samples = torch.arange(len(lengths), device=mask.device)
        self.row = expand(samples, lengths)[self.mask]
        start = torch.cumsum(self.counts, 0) - self.counts
        self.column = torch.arange(len(self.row), device=mask.device) - start[self.row]
        self.width = int(self.counts.max()) if len(lengths) else 0

    def pack(self, values: Tensor) -> Tensor:
        """[tokens] -> [samples, longest], the missing places 0."""
        matrix = values.new_zeros(len(self.counts), self.width)
        matrix[self.row, self.column] = values[self.mask]
        return matrix

    def unpack(self, matrix: Tensor) -> Tensor:
        """[samples, longest] -> [tokens], masked tokens 0."""
        values = matrix.new_zeros(len(self.mask))
        values[self.mask] = matrix[self.row, self.column]
        return values
