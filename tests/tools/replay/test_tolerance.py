"""Values of two runs are compared bit for bit or within a tolerance; the first difference has an index."""

import numpy as np
import pytest

from miles_tools.replay.tolerance import Tolerance

NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 4], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
        ([], [4], 0),
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, None], [1.0, None], None),
        ([1.0, None], [1.0, 2.0], 1),
        (1.0, 1.0 + 1e-12, 0),
        (None, None, None),
        (None, [], 0),
        ("text", "other", 0),
        ({"a": 1.0}, {"a": 1.0}, None),
        ({"a": 1.0}, {"b": 1.0}, 0),
        ([[1], [2, 3]], [[1], [2, 3]], None),
        ([[1], [2, 3]], [[1], [2, 4]], 0),
        (np.zeros((2, 3)), np.zeros((2, 3)), None),
        (np.zeros((2, 3)), np.zeros((2, 4)), 0),
        (np.zeros((2, 0)), np.zeros((2, 0)), None),
        (np.eye(3), np.eye(3)[::-1], 0),
    ],
)
def test_the_first_difference_has_an_index(a, b, index):
    assert Tolerance().find(a, b) == index


def test_a_tolerance_is_relative_and_for_fractions_only():
    same = Tolerance(0.01)
    assert same.find([100.0, 0.001], [100.9, 0.009]) is None
    assert same.find([100.0, 0.0], [100.0, 0.02]) == 1
    assert same.find([100], [101]) == 0
