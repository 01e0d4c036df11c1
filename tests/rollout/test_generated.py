"""What a custom generate function hands over."""

import math

import numpy as np
import pytest

from miles_core.contracts.engine import Sampling
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.rollout.continuation import check_samples, merge_sampling


def made(**changes):
    return Sample(
        **{
            "tokens": [1, 2, 3],
            "response_length": 2,
            "response": "ab",
            "status": Status.COMPLETED,
            "index": 7,
            **changes,
        }
    )


def test_what_is_right_is_taken():
    (one,) = check_samples(made(status="failed", loss_mask=[1, 0], rollout_log_probs=[-1.0, 0.0]), 7, "g.py", 4)
    assert one.status is Status.FAILED
    assert check_samples(made(tokens=np.array([3, 1, 2])), 7, "g.py", 4)[0].tokens == [3, 1, 2]
    assert len(check_samples([made(), made(tokens=[np.int64(3)], response_length=np.int64(0))], 7, "g.py", 4)) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens of type NoneType"),
        ({"tokens": np.array([[1, 2]])}, "tokens of type ndarray"),
        ({"tokens": [1, 4]}, "the token 4; token ids are 0 to 3"),
        ({"tokens": [1.0, 1]}, "the token 1.0"),
        ({"response_length": "2"}, "a response_length of '2'"),
        ({"response_length": -1}, "a response_length of -1"),
        ({"response_length": 4}, "a response_length of 4"),
        ({"loss_mask": "11"}, "a loss_mask of '11'"),
        ({"loss_mask": [0.5, 1]}, r"a loss_mask of \[0.5, 1\]"),
        ({"rollout_log_probs": ["a", "b"]}, r"rollout_log_probs of \['a', 'b'\]"),
        ({"rollout_log_probs": [math.nan, 0.0]}, "the log-probability nan"),
        ({"response": None}, "a NoneType as response"),
        ({"metadata": None}, "a str as response and a NoneType as metadata"),
        ({"status": "done"}, "the status 'done'; it is one of pending, completed"),
        ({"status": 5}, "the status 5"),
    ],
)
def test_what_a_sample_cannot_hold(changes, words):
    with pytest.raises(DataError, match=f"g.py: sample 7 has {words}"):
        check_samples(made(**changes), 7, "g.py", 4)


def test_one_sample_twice():
    one = made()
    with pytest.raises(DataError, match="returned one Sample twice for sample 7; return a copy"):
        check_samples([one, one], 7, "g.py", 4)


def test_one_sample_for_several_prompts():
    one = made()
    check_samples(one, 7, "g.py", 4)[0].rollout_id = 7  # as the run numbers it
    check_samples(one, 7, "g.py", 4)
    with pytest.raises(DataError, match="returned for sample 8 the same Sample object as for sample 7"):
        check_samples(one, 8, "g.py", 4)


def test_sampling_parameters():
    usual = Sampling(8, stop=("x",))
    assert merge_sampling(None, usual) is usual
    found = merge_sampling({"stop": "ab", "temperature": 0, "stop_token_ids": [3]}, usual)
    assert (found.stop, found.temperature, found.stop_token_ids, found.max_new_tokens) == (("ab",), 0, (3,), 8)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("x", "must be a mapping, got str"),
        ({"max_tokens": 3}, "has no 'max_tokens'; it takes ignore_eos, max_new_tokens"),
        ({5: 3}, "has no 5"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3', and must be a whole number"),
        ({"temperature": None}, "temperature is None, and must be a number"),
        ({"stop": [""]}, r"stop is \[''\], and must be texts of at least one character"),
        ({"stop": None}, "stop is None"),
        ({"ignore_eos": 1}, "ignore_eos is 1, and must be True or False"),
    ],
)
def test_sampling_parameters_of_another_type(params, words):
    with pytest.raises(DataError, match=words):
        merge_sampling(params, Sampling(8))
