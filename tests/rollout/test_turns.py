"""Samples of one turn: a group without a task for each sample."""

from __future__ import annotations

import asyncio
import gc

import pytest

from miles_core.contracts.answer import Answer
from miles_core.contracts.engine import Response, Sampling
from miles_core.data.sample import Sample, Status
from miles_core.errors import PluginError
from miles_core.reward.reward import RewardFunction
from miles_core.rollout.collect import Scorer
from miles_core.rollout.function import SingleTurn
from miles_core.rollout.generate import Functions, Generator, LocalProducer
from miles_testing import toy_run


class Held:
    """An engine whose answers the test sets."""

    def __init__(self) -> None:
        self.requests, self.answers, self.cancelled, self.aborted = [], [], [], []

    def generate(self, request):
        self.requests.append(request)
        self.answers.append(Answer(self.cancelled))
        return self.answers[-1]

    async def abort(self, keys) -> None:
        self.aborted += keys


def respond(text="a", tokens=(5, 6), finish="length", version=0) -> Response:
    return Response(list(tokens), [-1.0] * len(tokens), finish, text, [(0, version)])


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def make_rule() -> RewardFunction:
    async def reward(args, sample):
        raise AssertionError("the rule computes the reward")

    reward.rule = lambda response, label: float(response == label)  # type: ignore[attr-defined]
    return RewardFunction(reward, "rule", "test", "async")


def make_waiting() -> RewardFunction:
    async def reward(args, sample):
        await asyncio.sleep(0)
        return float(sample.response == sample.label)

    return RewardFunction(reward, "judge", "test", "async")


def pending(count: int = 3) -> list[Sample]:
    return [Sample(tokens=[1, 2], label="a", index=index, group_index=4) for index in range(count)]


@pytest.fixture(scope="module")
def run():
    return toy_run(steps=1).run


def producer_of(run, engine: Held, reward: RewardFunction) -> LocalProducer:
    functions = Functions("turn", {"turn": SingleTurn()})
    return LocalProducer(run, {run.policy.name: engine}, functions, Scorer(run, reward, {}))  # type: ignore[dict-item]


@pytest.mark.parametrize("make", [make_rule, make_waiting])
def test_early_samples_are_scored_while_others_are_generated(run, make):
    engine, samples = Held(), pending()

    async def main():
        group = asyncio.create_task(producer_of(run, engine, make()).produce(samples))
        await settle()
        engine.answers[1].set_result(respond())
        await settle()
        early = [sample.reward for sample in samples]
        engine.answers[0].set_result(respond("b", finish="stop"))
        engine.answers[2].set_result(respond())
        return early, await group

    early, group = asyncio.run(main())
    assert early == [None, 1.0, None]
    assert [s.index for s in group] == [0, 1, 2] and [s.reward for s in group] == [0.0, 1.0, 1.0]
    assert [s.status for s in group] == [Status.COMPLETED, Status.TRUNCATED, Status.TRUNCATED]
    assert all(s.tokens == [1, 2, 5, 6] and s.weight_versions == [(2, 0)] for s in group)
    assert [(r.key, r.group, r.policy) for r in engine.requests] == [(i, 4, run.policy.name) for i in range(3)]


def test_samples_whose_responses_arrive_together_are_finished_together(run):
    engine, together = Held(), []

    async def main():
        functions = Functions("turn", {"turn": SingleTurn()})
        generator = Generator(run, {run.policy.name: engine}, Sampling(4), functions)  # type: ignore[dict-item]
        turns = asyncio.create_task(
            generator.take_turns(pending(4), lambda made: together.append([s.index for s in made]))
        )
        await settle()
        for step in ([2], [0, 3], [1]):
            for index in step:
                engine.answers[index].set_result(respond())
            await settle()
        await turns

    asyncio.run(main())
    assert together == [[2], [0, 3], [1]]


def test_an_aborted_response_is_continued(run):
    engine, samples = Held(), pending(2)

    async def main():
        group = asyncio.create_task(producer_of(run, engine, make_rule()).produce(samples))
        await settle()
        engine.answers[0].set_result(respond(finish="abort"))
        engine.answers[1].set_result(respond())
        await settle()
        engine.answers[2].set_result(respond("c", tokens=[7, 8], finish="stop"))
        return await group

    first = asyncio.run(main())[0]
    assert first.tokens == [1, 2, 5, 6, 7, 8] and first.status is Status.COMPLETED and first.reward == 0.0
    assert engine.requests[2].tokens == [1, 2, 5, 6] and engine.requests[2].key == engine.requests[0].key


def test_one_invalid_response_ends_the_group_and_cancels_the_others(run):
    engine = Held()

    async def main():
        group = asyncio.create_task(producer_of(run, engine, make_rule()).produce(pending()))
        await settle()
        engine.answers[0].set_result(respond())
        engine.answers[1].set_result(respond(tokens=[5, 10**6]))
        await group

    with pytest.raises(PluginError, match="the token 1000000"):
        asyncio.run(main())
    assert engine.cancelled == [engine.answers[2]]


def test_a_dropped_group_cancels_its_answers_and_aborts_its_requests(run):
    engine = Held()

    async def main():
        producer = producer_of(run, engine, make_rule())
        group = asyncio.create_task(producer.produce(pending()))
        await settle()
        engine.answers[0].set_result(respond())
        await settle()
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        await producer.abort([0, 1, 2])
        return group.cancelled()

    assert asyncio.run(main())
    assert engine.cancelled == engine.answers[1:] and engine.aborted == [1, 2]


def test_no_error_of_a_group_is_left_unseen(run):
    """A broken engine fails all requests in one step; only the first error is raised."""
    engine, unseen = Held(), []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context["message"]))
        group = asyncio.create_task(producer_of(run, engine, make_rule()).produce(pending()))
        await settle()
        for answer in engine.answers:
            answer.set_exception(ArithmeticError("broken layer"))
        await asyncio.wait([group])
        assert isinstance(group.exception(), ArithmeticError)
        del group, answer
        engine.answers.clear()
        gc.collect()

    asyncio.run(main())
    assert unseen == []
