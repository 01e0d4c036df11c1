"""What the engine said, laid out over a sample's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engine import Response
from miles_core.data.field import Field
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.rollout.record import Record

ROUTES = Field("routes", "int32", "token-1", pad=-1, shape=(None,))
SUPPORT = Field("support", "int32", "response", ragged=True)


def test_one_call_fills_everything():
    record = Record()
    record.add([5, 6], Response([7, 8], [-1.0, -2.0], "stop", weight_versions=[(0, 3)]))
    sample = Sample(tokens=[5, 6, 7, 8], response_length=2)
    record.finish(sample, ())
    assert sample.loss_mask is None and sample.rollout_log_probs == [-1.0, -2.0]
    assert sample.weight_versions == [(2, 3)] and sample.status is Status.COMPLETED


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5), st.integers(1, 4))
def test_any_number_of_turns_is_laid_out_token_by_token(turns, prompt):
    """Each turn: so many generated tokens, then so many of a tool. Every row says which call and place it came from."""
    record, tokens, mask, logs, support = Record(), list(range(prompt)), [], [], []
    for call, (generated, tool) in enumerate(turns):
        new = [100 * call + i for i in range(generated)]
        rows = np.array([[len(tokens)]] * (len(tokens) + generated - 1), np.int32).reshape(-1, 1)
        extras = {"routes": rows, "support": [np.array([t]) for t in new]}
        record.add(tokens, Response(new, [-float(t) for t in new], "length", extras=extras))
        tokens = tokens + new + [9] * tool
        mask += [1] * generated + [0] * tool
        logs += [-float(t) for t in new] + [0.0] * tool
        support += [[t] for t in new] + [[]] * tool
    sample = Sample(tokens=tokens, response_length=len(tokens) - prompt)
    record.finish(sample, (ROUTES, SUPPORT))
    assert sample.mask == mask and sample.rollout_log_probs == logs
    assert [row.tolist() for row in sample.support] == support
    # a row known from an earlier call stays, the last tool's rows are unknown
    assert len(sample.routes) == len(tokens) - 1
    known = sample.routes[:, 0].tolist()
    tool_rows = turns[-1][1]
    assert known[len(known) - tool_rows :] == [-1] * tool_rows and -1 not in known[: len(known) - tool_rows]
    assert known[: prompt + turns[0][0] - 1] == [prompt] * (prompt + turns[0][0] - 1)
    sample.validate((ROUTES, SUPPORT))


def test_calls_of_a_sibling_are_left_out():
    record = Record()
    record.add([1], Response([2], [-1.0], "stop"))
    record.add([1], Response([3], [-2.0], "length"))
    first, second = Sample(tokens=[1, 2], response_length=1), Sample(tokens=[1, 3], response_length=1)
    record.finish(first, ())
    record.finish(second, ())
    assert (first.rollout_log_probs, second.rollout_log_probs) == ([-1.0], [-2.0])
    assert (first.status, second.status) == (Status.COMPLETED, Status.TRUNCATED)


def test_what_a_generate_function_set_itself_is_kept():
    record = Record()
    record.add([1], Response([2, 3], [-1.0, -2.0], "stop", weight_versions=[(0, 1)]))
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1], status=Status.TRUNCATED)
    sample.rollout_log_probs = [0.0, -5.0]
    record.finish(sample, ())
    assert (sample.loss_mask, sample.rollout_log_probs, sample.status) == ([0, 1], [0.0, -5.0], Status.TRUNCATED)


def test_tokens_the_engine_never_saw():
    record = Record()
    record.add([1], Response([2], [-1.0], "stop"))
    with pytest.raises(DataError, match="sample 4: its tokens do not continue any call of the engine"):
        record.finish(Sample(tokens=[1, 9], response_length=1, index=4), ())
    record.finish(Sample(tokens=[1, 9], response_length=1, status=Status.FAILED), ())
    with pytest.raises(DataError, match="the engine generated token 1 of its prompt of 2 tokens"):
        record.finish(Sample(tokens=[1, 2], response_length=0), ())


@pytest.mark.parametrize("log_probs", [[], [-1.0], [-1.0, -1.0, -1.0]])
def test_log_probs_of_another_number_than_the_tokens_are_refused(log_probs):
    record = Record()
    record.add([1], Response([2, 3], log_probs, "stop"))
    with pytest.raises(DataError, match=f"returned {len(log_probs)} log-probabilities for 2 tokens"):
        record.finish(Sample(tokens=[1, 2, 3], response_length=2), ())
