"""Responses that arrive together are checked together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.column import FLOATS, Column
from miles_core.rollout.requests import are_valid

REQUEST = Request([1, 2], Sampling(4))
PLAIN = Response([5, 6], [-0.5, -1.0], "stop", "ab", [(0, 3)])

WRONG = {
    "a token outside the vocabulary": {"tokens": [5, 100]},
    "a negative token": {"tokens": [5, -1]},
    "too many tokens": {"tokens": [5] * 5, "log_probs": [-1.0] * 5},
    "a log-probability too few": {"log_probs": [-0.5]},
    "a log-probability above 0": {"log_probs": [-0.5, 0.1]},
    "an infinite log-probability": {"log_probs": [-0.5, -float("inf")]},
    "NaN": {"log_probs": [float("nan"), -0.5]},
    "tokens that are no numbers": {"tokens": ["a", "b"]},
    "no token": {"tokens": [], "log_probs": []},
    "another finish": {"finish": "done"},
    "versions that begin later": {"weight_versions": [(1, 3)]},
    "a version without its first token": {"weight_versions": [3]},
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_response_is_found_among_others(name):
    wrong = replace(PLAIN, **WRONG[name])
    assert wrong.find_fault(REQUEST, 100)
    assert not are_valid([REQUEST] * 3, [PLAIN, wrong, PLAIN], 100)


def test_plain_responses_are_valid():
    zero = replace(PLAIN, log_probs=[0.0, 1e-4], finish="abort")
    assert are_valid([REQUEST] * 2, [PLAIN, zero], 7) and not zero.find_fault(REQUEST, 7)
    assert not are_valid([REQUEST], [PLAIN], 6) and PLAIN.find_fault(REQUEST, 6)


def test_rare_values_are_left_to_the_check_of_each():
    for rare in ({"weight_versions": []}, {"weight_versions": [(0, 3), (1, 4)]}):
        response = replace(PLAIN, **rare)
        assert not are_valid([REQUEST], [response], 100) and not response.find_fault(REQUEST, 100)
    numbers = replace(PLAIN, tokens=Column(FLOATS, [5.0, 6.0]))
    assert not are_valid([REQUEST], [numbers], 100)
    assert not are_valid([REQUEST], ["text"], 100)
