import torch

from miles_core.data.batch import Unmasked, expand, mask_counts, segment_sum


def test_sums_include_empty_samples_and_have_a_gradient():
    values = torch.arange(5.0).requires_grad_()
    lengths = torch.tensor([0, 2, 0, 3, 0])
    sums = segment_sum(values, lengths)
    assert sums.tolist() == [0.0, 1.0, 0.0, 9.0, 0.0]
    (sums * torch.arange(5)).sum().backward()
    assert values.grad.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    assert expand(torch.arange(5), lengths).tolist() == [1, 1, 3, 3, 3]


def test_unmasked_rows_and_back():
    mask = torch.tensor([0, 1, 0, 1, 1, 0])
    lengths = torch.tensor([4, 0, 2])
    unmasked = Unmasked(mask, lengths)
    matrix = unmasked.pack(torch.arange(6.0))
    assert matrix.tolist() == [[1.0, 3.0], [0.0, 0.0], [4.0, 0.0]]
    assert unmasked.unpack(matrix).tolist() == [0.0, 1.0, 0.0, 3.0, 4.0, 0.0]
    assert mask_counts(mask, lengths).tolist() == [2, 0, 1]


def test_no_samples_at_all():
    empty = torch.zeros(0)
    unmasked = Unmasked(empty, torch.zeros(0, dtype=torch.int64))
    assert unmasked.unpack(unmasked.pack(empty)).shape == (0,)
