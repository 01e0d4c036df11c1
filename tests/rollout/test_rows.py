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


def record(turns, drop):
    """Make a tree: each entry is (turn to continue or -1, generated tokens, tokens of a tool, policy)."""
    transcript, made = Transcript(0, str), []
    for number, (after, generated, tool, policy) in enumerate(turns):
        parent = made[after] if 0 <= after < number else None
        prompt = [900 + number] * (tool + 1)
        total = (parent.end if parent else 0) + len(prompt) + generated
        new = [100 * number + i for i in range(generated)]
        extras = {
            "routes": np.full((total - 1, 1), number, np.int32),
            "states": np.full((total, 1), number, np.int32),
            "support": [np.array([t]) for t in new],
        }
        made.append(transcript.add(parent, prompt, Response(new, [0.0] * generated, "stop", extras=extras), policy))
        if drop:
            drop_earlier_rows(made[-1])
    return transcript


@given(
    st.lists(
        st.tuples(st.integers(-1, 5), st.integers(1, 4), st.integers(0, 3), st.sampled_from(["one", "two"])),
        min_size=1,
        max_size=6,
    )
)
def test_samples_are_the_same(turns):
    results = []
    for drop in (False, True):
        transcript = record(turns, drop)
        samples = transcript.samples(Sample(tokens=[900]))
        for one in samples:
            transcript.fill(one, (ROUTES, STATES, SUPPORT))
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
