"""Transcripts: a tree of turns, and what engines reported about the tokens of a sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engine import Response
from miles_core.data.field import Field
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.rollout.transcript import Transcript

ROUTES = Field("routes", "int32", "token-1", pad=-1, shape=(None,))
SUPPORT = Field("support", "int32", "response", ragged=True)


def transcript():
    return Transcript(4, lambda tokens: "".join(chr(97 + t % 26) for t in tokens))


def answered(record, tokens, response, policy="a"):
    """Let the engine answer to ``tokens``, as ``ask(tokens)`` does."""
    parent = record.find(tokens)
    return record.add(parent, tokens[parent.end if parent else 0 :], response, policy)


def test_one_call_fills_everything():
    record = transcript()
    answered(record, [5, 6], Response([7, 8], [-1.0, -2.0], "stop", weight_versions=[(0, 3)]))
    sample = Sample(tokens=[5, 6, 7, 8], response_length=2)
    record.fill(sample, ())
    assert sample.loss_mask is None and sample.rollout_log_probs == [-1.0, -2.0]
    assert sample.weight_versions == [(2, 3)] and sample.status is Status.COMPLETED


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5), st.integers(1, 4))
def test_any_number_of_turns_is_laid_out_token_by_token(turns, prompt):
    """Each turn: so many generated tokens, then so many of a tool. Every row says which call and place it came from."""
    record, tokens, mask, logs, support = transcript(), list(range(prompt)), [], [], []
    for call, (generated, tool) in enumerate(turns):
        new = [100 * call + i for i in range(generated)]
        rows = np.array([[len(tokens)]] * (len(tokens) + generated - 1), np.int32).reshape(-1, 1)
        extras = {"routes": rows, "support": [np.array([t]) for t in new]}
        answered(record, tokens, Response(new, [-float(t) for t in new], "length", extras=extras))
        tokens = tokens + new + [9] * tool
        mask += [1] * generated + [0] * tool
        logs += [-float(t) for t in new] + [0.0] * tool
        support += [[t] for t in new] + [[]] * tool
    sample = Sample(tokens=tokens, response_length=len(tokens) - prompt)
    record.fill(sample, (ROUTES, SUPPORT))
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
    record = transcript()
    answered(record, [1], Response([2], [-1.0], "stop"))
    answered(record, [1], Response([3], [-2.0], "length"))
    first, second = Sample(tokens=[1, 2], response_length=1), Sample(tokens=[1, 3], response_length=1)
    record.fill(first, ())
    record.fill(second, ())
    assert (first.rollout_log_probs, second.rollout_log_probs) == ([-1.0], [-2.0])
    assert (first.status, second.status) == (Status.COMPLETED, Status.TRUNCATED)


def test_what_a_generate_function_set_itself_is_kept():
    record = transcript()
    answered(record, [1], Response([2, 3], [-1.0, -2.0], "stop", weight_versions=[(0, 1)]))
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1], status=Status.TRUNCATED)
    sample.rollout_log_probs = [0.0, -5.0]
    record.fill(sample, ())
    assert (sample.loss_mask, sample.rollout_log_probs, sample.status) == ([0, 1], [0.0, -5.0], Status.TRUNCATED)


def test_tokens_the_engine_never_saw():
    record = transcript()
    answered(record, [1], Response([2], [-1.0], "stop"))
    with pytest.raises(DataError, match="sample 4: its tokens do not continue any call of the engine"):
        record.fill(Sample(tokens=[1, 9], response_length=1, index=4), ())
    record.fill(Sample(tokens=[1, 9], response_length=1, status=Status.FAILED), ())
    with pytest.raises(DataError, match="the engine generated token 1 of its prompt of 2 tokens"):
        record.fill(Sample(tokens=[1, 2], response_length=0), ())


def test_tokens_of_another_policy():
    record = transcript()
    answered(record, [1, 2], response(3, 4), policy="a")
    with pytest.raises(
        DataError, match=r"its policy is b, but the policy a generated its tokens.*pass policy='b' to the call"
    ):
        record.fill(Sample(index=4, tokens=[1, 2, 3, 4], response_length=2, policy="b"), ())


@pytest.mark.parametrize("log_probs", [[], [-1.0], [-1.0, -1.0, -1.0]])
def test_log_probs_of_another_number_than_the_tokens_are_refused(log_probs):
    with pytest.raises(
        DataError, match=f"sample 4: the engine returned {len(log_probs)} log-probabilities for 2 tokens"
    ):
        answered(transcript(), [1], Response([2, 3], log_probs, "stop"))


def response(*tokens, finish="stop"):
    return Response(list(tokens), [-float(t) for t in tokens], finish, weight_versions=[(0, 1)])


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_dropped_id_of_an_earlier_turn_is_an_error_and_no_silent_mask(lost):
    """The agent drops one sampled id, and goes on: the second call's prompt is not what the first one generated."""
    record, first = transcript(), [5, 6, 7]
    answered(record, [1], response(*first))
    kept = [token for i, token in enumerate(first) if i != lost]
    answered(record, [1, *kept, 90], response(8))
    sample = Sample(tokens=[1, *kept, 90, 8], response_length=len(kept) + 2, index=4)
    with pytest.raises(
        DataError, match=f"sample 4 holds {lost} of the 3 tokens .* the token {first[lost]} is dropped or replaced"
    ):
        record.fill(sample, ())
    sample.loss_mask = [0] * (len(kept) + 1) + [1]  # on purpose
    record.fill(sample, ())
    assert sample.rollout_log_probs == [0.0] * (len(kept) + 1) + [-8.0]


def test_a_sample_that_ends_inside_an_answer_is_an_error():
    record = transcript()
    answered(record, [1], response(5, 6))
    with pytest.raises(
        DataError, match=r"holds 1 of the 2 tokens .* the token 6 is dropped or replaced \(it ends there\)"
    ):
        record.fill(Sample(tokens=[1, 5], response_length=1), ())


def test_a_mask_may_not_train_what_no_engine_generated():
    record = transcript()
    answered(record, [1], response(5, 6))
    sample = Sample(tokens=[1, 5, 6, 9], response_length=3, loss_mask=[1, 1, 1], index=4)
    with pytest.raises(DataError, match="sample 4: loss_mask trains token 2 of its response"):
        record.fill(sample, ())


def test_a_rejected_answer_is_a_branch_and_no_error():
    record = transcript()
    answered(record, [1], response(5, 6))
    answered(record, [1, 9], response(7))
    sample = Sample(tokens=[1, 9, 7], response_length=2)
    record.fill(sample, ())
    assert sample.mask == [0, 1] and (record.branches, record.unused([sample])) == (1, 1)


def test_a_history_that_was_rendered_again_may_begin_like_an_answer():
    """A client that writes an argument differently: the first ids of the answer are the same, then others follow, all in the prompt."""
    record = transcript()
    answered(record, [5], response(7, 8, 9))
    answered(record, [5, 7, 8, 6, 4], response(3))
    sample = Sample(tokens=[5, 7, 8, 6, 4, 3], response_length=1)
    record.fill(sample, ())
    assert sample.rollout_log_probs == [-3.0] and record.unused([sample]) == 1


def test_turns_form_a_tree_whose_paths_are_samples_and_train_each_turn_once():
    record = transcript()
    root = record.add(None, [1, 2], response(5, 6), "a")
    left = record.add(root, [9], response(7), "a")
    right = record.add(root, [8], response(4, 3), "a")
    retry = record.add(right, [], response(2, finish="length"), "a")
    assert [turn.tokens for turn in record.leaves] == [[1, 2, 5, 6, 9, 7], [1, 2, 5, 6, 8, 4, 3, 2]]
    assert (record.branches, left.path, record.find([1, 2, 5, 6, 8, 4, 3, 0])) == (1, [root, left], right)
    one, two = record.samples(Sample(metadata={"x": 1}, index=3))
    for sample in (one, two):
        record.fill(sample, ())
    assert one.loss_mask == [1, 1, 0, 1] and two.loss_mask == [0, 0, 0, 1, 1, 1]
    assert two.rollout_log_probs == [0.0, 0.0, 0.0, -4.0, -3.0, -2.0]
    assert (one.status, two.status) == (Status.COMPLETED, Status.TRUNCATED)
    assert one.metadata is not two.metadata and record.unused([one, two]) == 0
    retry.discarded = True
    assert record.leaves == [left, right]


def test_policies_that_answer_in_turn_get_a_sample_each():
    record = transcript()
    first = record.add(None, [1], response(5), "a")
    second = record.add(first, [9], response(6, 7), "b")
    third = record.add(second, [9], response(8), "a")
    assert third.policy == "a"
    one, two = record.samples(Sample())
    for sample in (one, two):
        record.fill(sample, ())
    assert one.tokens == two.tokens == [1, 5, 9, 6, 7, 9, 8] and (one.policy, two.policy) == ("a", "b")
    assert one.loss_mask == [1, 0, 0, 0, 0, 1] and two.loss_mask == [0, 0, 1, 1, 0, 0]
    assert two.rollout_log_probs == [0.0, 0.0, -6.0, -7.0, 0.0, 0.0] and two.weight_versions == [(3, 1)]


def test_an_answer_that_is_cut_is_a_turn_of_its_own():
    record = transcript()
    whole = record.add(None, [1], response(5, 6, 7), "a")
    part = record.cut(whole, 2)
    assert record.leaves == [part] and (part.response.text, part.response.log_probs) == ("fg", [-5.0, -6.0])
    after = record.add(part, [9], response(8), "a")
    (sample,) = record.samples(Sample())
    record.fill(sample, ())
    assert sample.tokens == after.tokens == [1, 5, 6, 9, 8] and sample.loss_mask == [1, 1, 0, 1]
    with pytest.raises(DataError, match="an answer of 3 tokens cannot be cut to 4"):
        record.cut(whole, 4)
