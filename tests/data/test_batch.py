"""Selecting samples of a batch."""

import numpy as np
import pytest
import torch

from miles_core.data import Sample, collate
from miles_core.data.batch import Ragged

LENGTHS = (4, 2, 5, 3)


def make_batch():
    batch = collate([
        Sample(tokens=list(range(10 * i, 10 * i + n)), response_length=1, group_index=i, index=i)
        for i, n in enumerate(LENGTHS)
    ])  # fmt: skip
    total = sum(LENGTHS)
    batch.columns["wide"] = torch.arange(total * 6, dtype=torch.int16).view(total, 3, 2)
    counts = torch.arange(total) % 3
    offsets = torch.tensor([0, *np.cumsum(counts)])
    batch.columns["ragged"] = Ragged(torch.arange(int(offsets[-1])), offsets)
    return batch


@pytest.mark.parametrize("samples", [[], [2], [0, 1, 2, 3], [1, 2], [3, 0], [2, 3, 0, 1], [1, 1]])
def test_rows_are_those_of_the_samples_in_their_order(samples):
    batch = make_batch()
    starts = np.cumsum([0, *LENGTHS])
    rows = [t for i in samples for t in range(starts[i], starts[i + 1])]
    found = batch.select(samples)
    assert found.tokens.tolist() == batch.tokens[rows].tolist() and found.lengths.tolist() == [
        LENGTHS[i] for i in samples
    ]
    assert torch.equal(found.columns["wide"], batch.columns["wide"][rows])
    ragged, expected = found.columns["ragged"], batch.columns["ragged"].select(torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(ragged.values, expected.values) and torch.equal(ragged.offsets, expected.offsets)


def test_samples_in_sequence_are_not_copied():
    """A copy of the records of experts by index took 10 ms of a step with 82,000 tokens."""
    batch = make_batch()
    assert batch.select([1, 2]).columns["wide"].data_ptr() == batch.columns["wide"][LENGTHS[0]].data_ptr()
