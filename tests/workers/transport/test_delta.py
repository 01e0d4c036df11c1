"""Differences between two versions of a bucket."""

from __future__ import annotations

import pytest
import torch

from miles_core.errors import SyncError
from miles_workers.transport.delta import apply, difference


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).flatten()


def stepped(weights, share):
    """A step that changes such a share of BF16 weights by one unit in the last place, and one of them altogether."""
    words = weights.view(torch.int16).clone()
    words[torch.rand(len(words)) < share] += 1
    words[-1] = 12345
    return words


@pytest.mark.parametrize(("share", "at_most"), [(0.0, 0.001), (0.01, 0.02), (0.2, 0.25)])
def test_a_difference_restores_the_new_bytes_and_is_small(share, at_most):
    base = torch.randn(1 << 17).bfloat16()
    new = bytes_of(stepped(base, share))
    changed = difference(new, bytes_of(base))
    assert len(changed) < at_most * len(new)
    again = bytes_of(base).clone()
    apply(again, changed)
    assert torch.equal(again, new)


def test_far_apart_changes_and_none_at_all():
    base = torch.zeros(1 << 20, dtype=torch.uint8)
    new = base.clone()
    new[[0, 70_001, (1 << 20) - 1]] = 9
    changed = difference(new, base)
    apply(base, changed)
    assert torch.equal(base, new) and len(changed) < 100
    apply(base, difference(new, base))
    assert torch.equal(base, new)


def test_bytes_that_changed_altogether_are_better_sent_as_they_are():
    assert difference(bytes_of(torch.randn(4096)), bytes_of(torch.randn(4096))) is None


@pytest.mark.parametrize("broken", [b"", b"abc", b"\xff" * 40])
def test_what_is_no_difference_is_said(broken):
    with pytest.raises(SyncError, match="cannot be read"):
        apply(torch.zeros(64, dtype=torch.uint8), broken)
    short = difference(torch.ones(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8))
    assert short is None
