"""The estimators against enumeration of every choice of k samples."""

import math
from itertools import combinations

import pytest

from miles_pass_at_k.estimate import find_answer, majority_at, mean_interval, pass_at


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_mean_over_all_choices(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            chosen = [any(i < c for i in some) for some in combinations(range(n), k)]
            assert pass_at(n, c, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_majority_over_disjoint_sets():
    answers, right = list("aabbcbab"), [x == "b" for x in "aabbcbab"]
    assert majority_at(answers, right, 8) == 1.0  # four of b, three of a
    assert majority_at(answers, right, 1) == 0.5
    assert majority_at(list("abb"), [False, True, True], 3) == 1.0
    assert majority_at(list("ab"), [False, True], 2) == 0.0  # the first wins a tie
    assert majority_at(list("abb"), [False, True, True], 2) == 0.0  # the third is in no set


def test_intervals():
    assert mean_interval([0.5]) == (0.5, None)
    mean, width = mean_interval([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and width == pytest.approx(1.96 * math.sqrt(1 / 3) / 2, rel=1e-3)


def test_answers():
    assert find_answer(r"so \boxed{1}, no: \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert find_answer("thinking\n 42 \n\n") == "42"
    assert find_answer("  \n") == ""
