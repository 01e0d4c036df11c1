"""Rows of recorded fields are kept once per conversation, and samples are the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.chat import drop_earlier_rows
from miles_core.data import Sample
from miles_core.data.field import Field
from miles_core.engine import Response
from miles_core.rollout.transcript import Transcript

ROUTES = Field("routes", "int32", "token-1", pad=-1, shape=(None,))
STATES = Field("states", "int32", "token", pad=-1, shape=(None,))
SUPPORT = Field("support", "int32", "response", ragged=True)


NEWEST = Field("newest", "int32", "token-1", pad=-1, shape=(None,), newest=True)


def record(turns, drop, updates=()):
    """Make a tree: each entry is (turn to continue or -1, generated tokens, tokens of a tool, policy). The weights change before the turns
    ``updates``."""
    transcript, made = Transcript(0, str), []
    for number, (after, generated, tool, policy) in enumerate(turns):
        parent = made[after] if 0 <= after < number else None
        prompt = [900 + number] * (tool + 1)
        total = (parent.end if parent else 0) + len(prompt) + generated
        new = [100 * number + i for i in range(generated)]
        extras = {
            "routes": np.full((total - 1, 1), number, np.int32),
            "states": np.full((total, 1), number, np.int32),
            "newest": np.full((total - 1, 1), sum(update <= number for update in updates), np.int32),
            "support": [np.array([t]) for t in new],
        }
        versions = [(0, sum(update <= number for update in updates))]
        response = Response(new, [0.0] * generated, "stop", weight_versions=versions, extras=extras)
        made.append(transcript.add(parent, prompt, response, policy))
        if drop:
            drop_earlier_rows(made[-1])
    return transcript


@given(
    st.lists(
        st.tuples(st.integers(-1, 5), st.integers(1, 4), st.integers(0, 3), st.sampled_from(["one", "two"])),
        min_size=1,
        max_size=6,
    ),
    st.sets(st.integers(1, 5)),
)
def test_samples_are_the_same(turns, updates):
    results = []
    for drop in (False, True):
        transcript = record(turns, drop, updates)
        samples = transcript.samples(Sample(tokens=[900]))
        for one in samples:
            transcript.fill(one, (ROUTES, STATES, NEWEST, SUPPORT))
        fields = [
            {name: [np.asarray(row).tolist() for row in rows] for name, rows in one.fields.items()} for one in samples
        ]
        results.append([(one.tokens, one.loss_mask, found) for one, found in zip(samples, fields, strict=True)])
    assert results[0] == results[1]


@pytest.mark.parametrize("field", ["routes", "states"])
def test_kept_rows_grow_with_the_tokens(field):
    """Each token has one row, and the last token of an answer a second one in the next turn."""
    turns = [(number - 1, 3, 2, "one") for number in range(20)]
    kept = sum(len(turn.response.extras[field]) for turn in record(turns, True).turns)
    everything = sum(len(turn.response.extras[field]) for turn in record(turns, False).turns)
    tokens = record(turns, True).turns[-1].end
    assert tokens - 1 <= kept <= tokens + 20 < everything / 5


def test_the_newest_rows_count_for_a_field_that_is_declared_so():
    turns = [(-1, 2, 0, "one"), (0, 2, 1, "one"), (1, 1, 0, "one")]
    transcript = record(turns, drop=True, updates={1})
    (sample,) = transcript.samples(Sample(tokens=[900]))
    transcript.fill(sample, (ROUTES, NEWEST))
    assert sample.fields["routes"].ravel().tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert sample.fields["newest"].ravel().tolist() == [1] * 8
