"""Reductions over flat columns: concatenated tokens of all samples, with the number of tokens of each in ``lengths [samples]``.

Index t of a sample refers to token t as *target* (prompt tokens are included, with mask 0). Sums use float64 and a fixed order within
each sample, so that a value does not depend on the other samples in the batch or micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values [tokens]`` over each sample: [samples], float64; an empty sample gives 0. Differentiable."""
    if len(lengths) == 0:  # segment_reduce does not support this case
        return values.double()[:0]
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0)


def expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat ``values [samples]`` on every token of its sample: [tokens]."""
    return torch.repeat_interleave(values, lengths)


def mask_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """Count the unmasked tokens of each sample: [samples], int64."""
    return segment_sum(mask.bool().double(), lengths).round().long()


class Unmasked:
    """Converts between flat columns and matrices [samples, longest] of each sample's unmasked tokens.

    Recursions over time thus treat unmasked tokens as adjacent, without steps for masked tokens (tool text between two turns).
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
        """Convert [tokens] to [samples, longest], padded with 0."""
        matrix = values.new_zeros(len(self.counts), self.width)
        matrix[self.row, self.column] = values[self.mask]
        return matrix

    def unpack(self, matrix: Tensor) -> Tensor:
        """Convert [samples, longest] to [tokens], with 0 for masked tokens."""
        values = matrix.new_zeros(len(self.mask))
        values[self.mask] = matrix[self.row, self.column]
        return values
