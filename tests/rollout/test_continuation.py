"""An aborted response goes on: the same tokens, log-probabilities and recorded rows as one that was never aborted."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.field import Field
from miles_core.errors import MilesError
from miles_core.rollout.continuation import can_continue, cut_at_stop, join_parts
from miles_embedded.engine.engine import EmbeddedEngine

ROUTES = Field("routes", "int32", "token-1")
SUPPORT = Field("support", "int32", "response", ragged=True)


def letters(tokens):
    return "".join(chr(97 + t) for t in tokens)


def response(tokens, finish="abort", first=0, prompt=2, versions=((0, 1),), **changes):
    extras = {
        "routes": np.arange(first, first + prompt + len(tokens) - 1),
        "support": [np.array([t]) for t in tokens],
    }
    given = {"text": letters(tokens), "weight_versions": list(versions), "extras": extras, **changes}
    return Response(list(tokens), [-float(t) for t in tokens], finish, **given)


def request():
    return Request([9, 9], Sampling(8), extras={"routes", "support"})


def test_a_stop_string_that_began_before_the_abort_ends_the_response():
    parts = [response([0, 1]), response([2, 3, 4], first=0, prompt=4)]
    cut_at_stop(parts, ("bcd", "zz"), (ROUTES, SUPPORT), letters)
    assert (parts[1].tokens, parts[1].log_probs, parts[1].finish) == ([2, 3], [-2.0, -3.0], "stop")
    assert len(parts[1].extras["routes"]) == 4 + 2 - 1 and len(parts[1].extras["support"]) == 2
    whole = join_parts(parts, ("bcd", "zz"), (ROUTES, SUPPORT), letters)
    assert (whole.tokens, whole.text, whole.finish) == ([0, 1, 2, 3], "a", "stop")
    untouched = [response([0, 1]), response([2, 3], prompt=4)]
    cut_at_stop(untouched, ("zz",), (ROUTES, SUPPORT), letters)
    assert untouched[1].tokens == [2, 3] and untouched[1].finish == "abort"


#: Pieces of text of several bytes, parts of a character, and a special token without text.
PIECES = [b"a", b"b", b"ab", b"\xe2", b"\x82", b"\xac", b"\xe2\x82\xac", b"", b"ba ", b"\xf0\x9f", b"\x98\x80"]


def pieces(tokens):
    return b"".join(PIECES[t] for t in tokens).decode(errors="replace")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    st.lists(st.sampled_from(["ab", "bab", "a\u20ac", "\u20acb", "\U0001f600a", "aaaa"]), min_size=1, max_size=2),
)
@settings(max_examples=300)
def test_stop_strings_are_found_where_decoding_every_prefix_finds_them(first, second, stop):
    if any(s in pieces(first) for s in stop):
        return  # the engine ended the response there
    counts = (n for n in range(1, len(second) + 1) if any(s in pieces(first + second[:n]) for s in stop))
    expected = next(counts, len(second))
    inside = next((n for n in range(1, len(second) + 1) if any(s in pieces(second[:n]) for s in stop)), len(second))
    second = second[:inside]  # the engine sees those that lie in one part
    parts = [Response(first, [0.0] * len(first), "abort"), Response(second, [0.0] * len(second), "abort")]
    cut_at_stop(parts, stop, (), pieces)
    assert parts[-1].tokens == second[: min(expected, inside)]


def test_looking_for_a_stop_string_does_not_decode_the_whole_response():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return letters([t % 20 for t in tokens])

    parts = [response([t % 20 for t in range(20_000)]) for _ in range(2)]
    cut_at_stop(parts, ("zz",), (), decode)
    assert sum(decoded) < 500


def test_nothing_goes_on_from_a_response_without_tokens_or_without_its_fields():
    assert can_continue(response([0, 1]), request())
    assert not can_continue(response([]), request())
    assert not can_continue(response([0, 1], extras={"support": []}), request())


def test_parts_become_one_response_in_which_the_earliest_row_stays():
    first = response([0, 1], first=0)
    last = response([2, 3], "stop", first=100, prompt=4, versions=[(0, 1), (1, 2)])
    whole = join_parts([first, last], (), (ROUTES, SUPPORT), letters)
    assert whole.tokens == [0, 1, 2, 3] and whole.finish == "stop" and whole.text == "abcd"
    assert whole.weight_versions == [(0, 1), (3, 2)]
    # two rows of the prompt and one of the first token from the first part, then the second's
    assert whole.extras["routes"].tolist() == [0, 1, 2, 103, 104]
    assert [row.tolist() for row in whole.extras["support"]] == [[0], [1], [2], [3]]


def test_rows_of_a_field_with_newest_rows_are_those_of_the_last_part():
    newest = replace(ROUTES, newest=True)
    first, last = response([0, 1]), response([2, 3], "stop", first=100, prompt=4)
    whole = join_parts([first, last], (), (newest, SUPPORT), letters)
    assert whole.extras["routes"].tolist() == [100, 101, 102, 103, 104]
    assert [row.tolist() for row in whole.extras["support"]] == [[0], [1], [2], [3]]
    short = response([2], "stop", extras={"routes": np.array([7]), "support": [np.array([2])]})
    assert join_parts([first, short], (), (newest, SUPPORT), letters).extras["routes"].tolist() == [7, 1, 2]


WATCH = """
from miles_core.plugin import hookimpl

@hookimpl
def on_start(run):
    run.state["samples"] = []

@hookimpl
def on_sample(run, sample):
    run.state["samples"].append(sample)
"""

TURNS = """
async def generate(args, sample, sampling_params):
    first = await args.generate(sample.tokens, {**sampling_params, "max_new_tokens": 9})
    tokens = sample.tokens + first.tokens + [70, 71]
    second = await args.generate(tokens)
    sample.tokens = tokens + second.tokens
    sample.response_length = len(first.tokens) + 2 + len(second.tokens)
    sample.response = first.text + second.text
    return sample
"""


@pytest.fixture
def aborting(monkeypatch):
    """From now on engines abort each request by themselves after a few steps, again and again; how often they did."""
    plain, ticks, aborted = EmbeddedEngine.generate, itertools.cycle([2, 5, 3]), []

    async def generate(self, request):
        task = asyncio.ensure_future(plain(self, request))
        for _ in range(next(ticks)):
            await asyncio.sleep(0)
        await self.abort([request.key])
        answer = await task
        aborted.append(answer.finish == "abort")
        return answer

    def start():
        monkeypatch.setattr(EmbeddedEngine, "generate", generate)
        return aborted

    return start


@pytest.mark.parametrize(
    ("plugins", "options"),
    [
        ([], {}),
        (["r3", "tis"], {"rollout_top_k": 5}),
        ([], {"rollout_stop": "e,ab"}),
        (["r3"], {"custom": True}),
    ],
    ids=["bare", "r3+tis", "stop strings", "turns"],
)
def test_a_run_whose_engine_aborts_by_itself_has_the_samples_of_one_that_does_not(
    toy_run, tmp_path, aborting, plugins, options
):
    options = dict(options)
    (tmp_path / "watch.py").write_text(WATCH)
    (tmp_path / "turns.py").write_text(TURNS)
    if options.pop("custom", False):
        options["custom_generate_function_path"] = tmp_path / "turns.py"
    given = {"steps": 1, "rollout_max_response_len": 12, **options}
    runs = [toy_run([*plugins, str(tmp_path / "watch.py")], **given)]
    aborted = aborting()
    runs.append(toy_run([*plugins, str(tmp_path / "watch.py")], **given))
    assert sum(aborted) >= 8
    for one, two in zip(*(sorted(run.run.state["samples"], key=lambda s: s.index) for run in runs), strict=True):
        assert (one.tokens, one.response, one.status) == (two.tokens, two.response, two.status)
        np.testing.assert_allclose(one.rollout_log_probs, two.rollout_log_probs, atol=1e-4)
        assert one.mask == two.mask and {v for _, v in two.weight_versions} == {0}
        assert one.fields.keys() == two.fields.keys()
        for name, rows in one.fields.items():
            for a, b in zip(rows, two.fields[name], strict=True):
                np.testing.assert_array_equal(a, b)


def test_an_engine_that_never_gets_anywhere_is_named(toy_run, monkeypatch):
    async def generate(self, request):
        return Response([], [], "abort")

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    with pytest.raises(MilesError, match=r"aborted the request of sample \d 100 times in a row"):
        toy_run(steps=1)


def test_without_partial_rollout_no_response_has_tokens_of_two_versions(toy_run, tmp_path, monkeypatch):
    """An engine that aborts and has new weights when it is asked again: the request starts from its prompt."""
    (tmp_path / "watch.py").write_text(WATCH)
    plain, asked = EmbeddedEngine.generate, []

    async def generate(self, request):
        answer = await plain(self, request)
        asked.append(len(request.tokens))
        if len(asked) <= 8:  # the first answer of each sample is cut, as if weights had changed after it
            short = Response(answer.tokens[:2], answer.log_probs[:2], "abort", "", [(0, -7)])
            return short
        return answer

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    run = toy_run([str(tmp_path / "watch.py")], steps=1)
    assert all({v for _, v in s.weight_versions} == {0} for s in run.run.state["samples"])
    assert len(asked) == 24 and len(set(asked[:8])) == 1 and sorted(asked[8:])[:8] == asked[:8]
