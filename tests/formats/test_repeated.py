"""Which tensors are read as one."""

import torch

from miles_formats.repeated import join_adjacent


def test_tensors_that_follow_each_other_are_one():
    whole, other = torch.arange(24.0).view(4, 6), torch.arange(6.0)
    parts = [whole[2:3], other[:3], whole[0:2], whole[3, :4], other[4:]]
    found = sorted(join_adjacent(parts), key=len)
    assert [len(each) for each in found] == [2, 3, 22]
    whole.add_(1)  # they are views
    assert torch.equal(found[-1], whole.flatten()[:22])


def test_other_layouts_stay_alone():
    whole = torch.arange(24.0).view(4, 6)
    parts = [whole[:, :3], whole[:, 3:]]
    found = join_adjacent(parts)
    assert len(found) == 2 and all(any(a is b for b in parts) for a in found)
