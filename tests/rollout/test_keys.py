"""Request keys: unique, stable, and what random numbers depend on."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.errors import MilesError
from miles_core.rollout.requests import FIRST_EVALUATION, FIRST_PROBE, MAX_CALLS, MAX_SAMPLES, RequestKeys, request_key
from miles_embedded.engine.engine import EmbeddedEngine

SAMPLES = st.one_of(
    st.integers(0, MAX_SAMPLES - 1), st.sampled_from([0, 1, FIRST_EVALUATION, FIRST_PROBE, MAX_SAMPLES - 1])
)
CALLS = st.one_of(st.integers(0, MAX_CALLS - 1), st.sampled_from([0, 1, MAX_CALLS - 1]))


@given(st.sets(st.tuples(SAMPLES, CALLS), max_size=50))
def test_no_two_calls_share_a_key_and_all_fit_a_signed_integer(calls):
    keys = [request_key(*call) for call in calls]
    assert len(set(keys)) == len(calls)
    assert all(0 <= key < 1 << 63 for key in keys)


@given(SAMPLES)
def test_the_first_call_has_the_number_of_its_sample(sample):
    assert request_key(sample, 0) == RequestKeys().next(sample) == sample


@pytest.mark.parametrize(
    ("sample", "call", "message"),
    [
        (-1, 0, "sample -1 has no key"),
        (MAX_SAMPLES, 0, "has no key"),
        (3, MAX_CALLS, "sample 3 calls the engine more than"),
    ],
)
def test_numbers_out_of_range_are_refused(sample, call, message):
    with pytest.raises(MilesError, match=message):
        request_key(sample, call)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_keys_in_flight_are_distinct_whatever_samples_come_and_go(events):
    keys, flying = RequestKeys(), {}
    for sample, ends in events:
        if ends:
            assert sorted(keys.keys_of([sample])) == sorted(flying.pop(sample, []))
            keys.forget([sample])
        else:
            flying.setdefault(sample, []).append(keys.next(sample))
        alive = [key for each in flying.values() for key in each]
        assert len(set(alive)) == len(alive)
    assert sorted(keys.keys_of(range(6))) == sorted(key for each in flying.values() for key in each)


WATCH = """
from miles_core.plugin import hookimpl

@hookimpl
def on_start(run):
    run.state["samples"] = []

@hookimpl
def on_sample(run, sample):
    run.state["samples"].append(sample)
"""

CANDIDATES = """
import asyncio

async def generate(args, sample, sampling_params):
    {ask}
    sample.metadata["candidates"] = [answer.tokens for answer in answers]
    sample.tokens = sample.tokens + answers[-1].tokens
    sample.response_length = len(answers[-1].tokens)
    return sample
"""

IN_TURN = "answers = [await args.generate(sample.tokens) for _ in range(3)]"
TOGETHER = "answers = await asyncio.gather(*(args.generate(sample.tokens) for _ in range(3)))"
BACKWARDS = """asked = [args.generate(sample.tokens) for _ in range(3)]
    answers = [await each for each in reversed(asked)][::-1]"""


@pytest.fixture
def candidates(toy_run, tmp_path):
    """``candidates(ask, **options)``: by sample, the texts that three calls with the same tokens returned."""
    (tmp_path / "watch.py").write_text(WATCH)

    def call(ask, plugins=(), **options):
        (tmp_path / "generate.py").write_text(CANDIDATES.format(ask=ask))
        given = {"custom_generate_function_path": tmp_path / "generate.py", "rollout_max_response_len": 12, **options}
        done = toy_run([*plugins, str(tmp_path / "watch.py")], **given, steps=1)
        return {s.index: s.metadata["candidates"] for s in done.run.state["samples"]}

    return call


def test_calls_with_the_same_tokens_return_different_texts(candidates):
    found = candidates(IN_TURN)
    assert len(found) == 8
    for texts in found.values():
        assert len(set(map(tuple, texts))) == 3
    assert candidates(TOGETHER) == candidates(BACKWARDS) == found, "the numbers depend on the order of the calls alone"


def test_calls_with_one_possible_token_agree(candidates):
    assert all(len(set(map(tuple, texts))) == 1 for texts in candidates(IN_TURN, rollout_top_k=1).values())


def test_the_first_call_draws_what_a_single_turn_draws(candidates, toy_run, tmp_path):
    first = {index: texts[0] for index, texts in candidates(IN_TURN).items()}
    done = toy_run([str(tmp_path / "watch.py")], steps=1, rollout_max_response_len=12)
    assert first == {s.index: s.tokens[s.prompt_length :] for s in done.run.state["samples"]}


@pytest.mark.parametrize("ask", [IN_TURN, TOGETHER], ids=["in turn", "together"])
def test_calls_that_engines_abort_go_on_with_their_own_numbers(candidates, monkeypatch, ask):
    whole, plain, aborted = candidates(ask), EmbeddedEngine.generate, []

    async def generate(self, request):
        task = asyncio.ensure_future(plain(self, request))
        for _ in range(3):
            await asyncio.sleep(0)
        await self.abort([request.key])  # the call's, and no other of its sample
        answer = await task
        aborted.append(answer.finish == "abort")
        return answer

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    assert candidates(ask) == whole and sum(aborted) > 24


class _Flying:
    """An engine whose requests return only when they are aborted."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    async def generate(self, request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def abort(self, keys) -> None:
        self.aborted += keys


def test_dropping_a_sample_aborts_each_of_its_calls(toy_run):
    from miles_core.data.sample import Sample
    from miles_core.rollout.function import PlainFunction
    from miles_core.rollout.generate import Functions, Generator

    run = toy_run(steps=1).run
    engine = _Flying()

    async def three(sample, ask):
        await asyncio.gather(*(ask([1, 2]) for _ in range(3)))

    async def dropped() -> list[int]:
        functions = Functions("three", {"three": PlainFunction(three)})
        generator = Generator(run, {run.policy.name: engine}, Sampling(4), functions)  # type: ignore[dict-item]
        tasks = [asyncio.create_task(generator.generate(Sample(tokens=[1, 2], index=index))) for index in (5, 6, 7)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await generator.abort([5, 7])
        return engine.aborted

    expected = [request_key(sample, call) for sample in (5, 7) for call in range(3)]
    assert sorted(asyncio.run(dropped())) == sorted(expected)


def test_probes_share_no_key_with_samples(toy_run):
    from miles_core.mismatch.probe import ProbePrompt, probe

    done, asked, policies = toy_run(steps=1), [], set()

    class Engine:
        capabilities = frozenset()

        async def generate(self, request: Request) -> Response:
            asked.append(request.key)
            policies.add(request.policy)
            return Response([3], [-1.0], "length", "", [(0, 0)])

    prompts = [ProbePrompt([1, 2]), ProbePrompt([3])]
    asyncio.run(probe(done.run, dataclasses.replace(done.parts[0], engine=Engine()), prompts, key=16))
    assert sorted(asked) == [FIRST_PROBE + 16, FIRST_PROBE + 17] and policies == {"policy"}
