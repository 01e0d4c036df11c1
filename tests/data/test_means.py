"""Means as (sum, weight) pairs."""

import torch

from miles_core.data.batch import add, as_floats, means


def test_means_are_weighted_and_skip_what_was_not_measured():
    pairs = {"kl": (torch.tensor(6.0), 3), "none": (0.0, 0.0), "loss": (1.0, 4.0)}
    assert means(as_floats(pairs)) == {"kl": 2.0, "loss": 0.25}


def test_pairs_are_added_name_by_name():
    total = {"loss": (1.0, 2.0)}
    add(total, {"loss": (0.5, 1.0), "kl": (3.0, 1.0)})
    assert total == {"loss": (1.5, 3.0), "kl": (3.0, 1.0)}


def test_of_maxima_the_larger_is_kept():
    total = {"gap_max": (torch.tensor(0.5), torch.tensor(2.0))}
    add(total, {"gap_max": (torch.tensor(0.25), torch.tensor(3.0))})
    floats = as_floats(total)
    add(floats, {"gap_max": (0.75, 1.0)})
    assert floats == {"gap_max": (0.75, 6.0)} and means(floats) == {"gap_max": 0.75}
    assert means({"gap_max": (0.0, 0.0)}) == {}
