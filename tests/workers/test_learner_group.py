"""Several ranks behind one handle, without any trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.config.load import load
from miles_core.contracts.run import Policy
from miles_core.contracts.runtime import TopLogProbs, TrainedTokens
from miles_core.contracts.transport import SyncReport
from miles_core.data.sample import Sample
from miles_core.data.world import World
from miles_core.errors import ConfigError, MilesError, NonFiniteError, WorkerLost
from miles_core.observe.timer import Clock
from miles_core.train.rank import Rank
from miles_workers.engine_pool import EnginePool
from miles_workers.learner_group import LearnerGroup
from miles_workers.rank_worker import RankWorker

RANKS = ("trainer-0", "trainer-1", "trainer-2", "trainer-3")
#: Two replicas of two ranks.
WORLDS = [World(n, 4, n // 2, 2) for n in range(4)]


def samples(groups=4):
    return [
        Sample(tokens=[0] * (3 + g), response_length=2, group_index=g, index=2 * g + i)
        for g in range(groups)
        for i in range(2)
    ]


@pytest.fixture
def group(recorded, build_info):
    def make(answers, worlds=WORLDS, engines=("engine-0", "engine-1")):
        config = load([], manifests={})
        plan = SimpleNamespace(fact=lambda name: None)
        run = SimpleNamespace(config=config, config_of=lambda policy: config, plan=plan, step=3, clock=Clock())
        ranks = recorded(RANKS[: len(worlds)], answers, trains=True)
        workers = recorded(engines, {"version": lambda number: made.sent})
        made = LearnerGroup(run, Policy(), ranks, worlds, EnginePool(workers, build_info, 1))
        made.sent = None
        return made

    return make


def learn(number, share, step):
    weight = float(len(share.samples))
    # the last rank of a replica computes the loss, the first one sees no token
    seen = [TrainedTokens(np.full(2, s.index), np.full(2, number)) for s in share.samples] if number % 2 else []
    return {"train/loss": (weight * number, weight)}, seen


def test_groups_are_divided_over_replicas_and_one_rank_of_each_is_counted(group):
    made = group({"learn": learn})
    made.ranks.clocks = {number: {"prepare": 0.1, "train": 0.1 + number} for number in range(4)}

    async def main():
        made.run.clock.metrics()  # the time to start the event loop does not count
        with made.run.clock.phase("other"):
            return await made.learn(samples(), 3)

    learned = asyncio.run(main())
    shares = [share for _, _, share, _ in made.ranks.asked("learn")]
    indexes = [sorted(s.index for s in share.samples) for share in shares]
    assert indexes[0] == indexes[1] and indexes[2] == indexes[3]
    assert sorted(indexes[0] + indexes[2]) == list(range(8))
    assert all(
        len({s.group_index for s in a.samples} & {s.group_index for s in b.samples}) == 0
        for a, b in [(shares[0], shares[2])]
    )
    assert learned.steps == 1 and learned.metrics == {"train/loss": pytest.approx((1 * 4 + 3 * 4) / 8)}
    assert [tokens.log_probs[0] for tokens in learned.tokens] == list(range(8))
    seconds = made.run.clock.metrics()
    assert seconds["time/train"] == pytest.approx(3.1) and seconds["time/prepare"] == pytest.approx(0.1)
    assert sum(v for k, v in seconds.items() if k != "time/step") == pytest.approx(seconds["time/step"], abs=0.01)


def test_log_probs_come_back_in_the_order_of_the_samples(group):
    made = group({"columns": lambda number, mine, *more: [{"log_probs": np.full(2, s.index)} for s in mine]})
    found = asyncio.run(made.log_probs(samples()))
    assert [row[0] for row in found] == list(range(8))


def test_supervised_samples_are_no_groups(group):
    made = group({"supervise": lambda number, mine, lr: {"sft/loss": (sum(s.index for s in mine), len(mine))}})
    rows = [Sample(tokens=[1, 2], response_length=1, index=n) for n in range(5)]
    assert asyncio.run(made.supervise(rows, 0.1)) == {"sft/loss": 2.0}
    assert [len(mine) for _, _, mine, _ in made.ranks.asked("supervise")] == [3, 3, 2, 2]


def advantaged():
    rows = samples()
    for sample in rows:
        sample.fields = {"advantages": [1.0, 1.0]}
    return rows


def test_gradients_come_back_in_the_order_of_the_samples(group):
    def forward_backward(number, mine, loss, settings):
        # the last rank of a replica computes the loss
        found = [np.full(2, s.index) for s in mine] if number % 2 else []
        return {"train/loss_sum": (1.0 + number, float(number < 2))}, found

    made = group({"forward_backward": forward_backward, "apply_gradients": lambda number, lr: {"train/lr": (lr, 1.0)}})
    found = asyncio.run(made.forward_backward(advantaged(), "ppo"))
    assert [row[0] for row in found.log_probs] == list(range(8))
    assert found.metrics == {"train/loss_sum": pytest.approx((2.0 + 4.0) / 1)}
    assert asyncio.run(made.optimizer_step(0.5)) == {"train/lr": 0.5} and made.policy.trained == 1


def test_if_one_rank_fails_all_drop_their_gradients(group):
    def forward_backward(number, mine, loss, settings):
        if number == 3:
            raise MilesError("the loss of this test fails")
        return {}, []

    made = group({"forward_backward": forward_backward, "drop_gradients": lambda number: None})
    with pytest.raises(MilesError, match="the loss of this test fails"):
        asyncio.run(made.forward_backward(advantaged(), "ppo"))
    assert [call[0] for call in made.ranks.asked("drop_gradients")] == [0, 1, 2, 3]


def pushed(made, worlds=WORLDS):
    def push(number, version, plain, push):
        made.sent = version
        return SyncReport(version, 10, 1, 0.5 + number)

    made.ranks.answers["push"] = push
    return made


def test_a_push_is_what_all_ranks_sent_and_connects_them_once(group):
    made = pushed(group({}))

    async def main():
        return [await made.push(4), await made.push(5)]

    first, _ = asyncio.run(main())
    assert (first.nbytes, first.tensors, first.seconds) == (40, 4, 3.5)
    assert len(made.ranks.asked("connect_engines")) == 4 and made.engines.version == 5


def test_engines_wait_for_the_ranks_that_send(group):
    worlds = [replace(world, sends=world.rank in (1, 3)) for world in WORLDS]
    made = pushed(group({}, worlds))
    asyncio.run(made.push(4))
    assert [call[2:] for call in made.engines.engines.asked("begin_push")] == [(1, ("trainer-1", "trainer-3"))] * 2
    assert {call[-1] for call in made.ranks.asked("connect_engines")} == {(1, 3)}
    assert [call[0] for call in made.ranks.asked("push")] == [0, 1, 2, 3]  # the others take part in the collectives


def test_a_rank_that_sends_nothing_calls_no_engine(toy_run, recorded, build_info):
    """It would otherwise send its end to each engine: ranks x engines messages."""
    run = toy_run(steps=1)
    trainer = run.trainer
    trainer.world = World(0, 2, sends=False)
    worker = object.__new__(RankWorker)
    worker.run, worker.part = run.run, Rank(run.run, Policy(), trainer)
    engines = recorded(("engine-0",), {})
    worker.connect_engines(engines, build_info, (1,))
    with pytest.raises(MilesError, match=r"yields model\.\S+ although its World says that it sends nothing"):
        asyncio.run(worker.push(1, False, 1))
    trainer.units = lambda everywhere=False: iter(())
    assert asyncio.run(worker.push(1, False, 1)).nbytes == 0 and not engines.calls


def test_a_push_is_made_again_after_an_engine_was_lost_in_it(group):
    made = group({})
    engines = made.engines.engines

    async def push(number, version, plain, push):
        made.sent = version
        if push == 1:
            if number == 2:
                engines.dead = {1}
                raise engines.lost_error(1, "it was killed")
            while (0, "begin_push", 2, RANKS) not in engines.calls:
                await asyncio.sleep(0)
        return SyncReport(version, 10, 1, 0.5)

    async def replace(number, lost):
        await engines.restart(number)

    async def main():
        made.ranks.answers["push"] = push
        made.engines.replace_with(replace, made.resend)
        return await asyncio.wait_for(made.push(4), 5)

    assert asyncio.run(main()).nbytes == 40
    assert [c[2] for c in engines.asked("begin_push") if c[0] == 0] == [1, 2, 3]
    assert made.engines.serving == {0, 1} and len(made.ranks.asked("connect_engines")) == 8


def test_an_engine_that_was_replaced_before_a_rank_reports_its_loss_is_not_replaced_again(group):
    made = group({})
    engines, replaced = made.engines.engines, []

    async def push(number, version, plain, push):
        made.sent = version
        if push == 1:
            lost = engines.lost_error(1, "it was killed")
            made.engines.replace_lost(lost)  # as a request that was in flight does
            while not made.engines.replacements:
                await asyncio.sleep(0)
            raise lost
        return SyncReport(version, 10, 1, 0.5)

    async def replace(number, lost):
        replaced.append(number)

    async def main():
        made.ranks.answers["push"] = push
        made.engines.replace_with(replace, made.resend)
        return await asyncio.wait_for(made.push(4), 5)

    assert asyncio.run(main()).nbytes == 40
    assert replaced == [1] and made.engines.serving == {0, 1}


def test_the_lost_rank_is_named_even_when_its_peers_complain_first(group):
    async def broken(number, share, step):
        if number == 1:
            await asyncio.sleep(0.05)
            raise made.ranks.lost_error(1, "it was killed")
        raise RuntimeError("connection closed by peer")

    made = group({"learn": broken})
    with pytest.raises(WorkerLost, match="trainer-1"):
        asyncio.run(made.learn(samples(), 0))
    assert not asyncio.run(made.is_intact())


@pytest.mark.parametrize(("answers", "intact"), [([True] * 4, True), ([True, True, False, True], False)])
def test_after_a_step_that_failed_the_ranks_say_what_their_weights_are(group, answers, intact):
    def broken(number, share, step):
        raise NonFiniteError("nan")

    made = group({"learn": broken, "is_intact": lambda number: answers[number]})
    with pytest.raises(NonFiniteError):
        asyncio.run(made.learn(samples(), 0))
    assert asyncio.run(made.is_intact()) is intact and made.policy.trained == 0


def test_a_frozen_policy_does_not_learn(group):
    made = group({"learn": learn})
    made.policy = Policy(name="judge", role="frozen")
    with pytest.raises(ConfigError, match="judge is frozen"):
        asyncio.run(made.learn(samples(), 0))


def test_values_and_top_log_probs_come_back_in_the_order_of_the_samples(group):
    made = group(
        {
            "columns": lambda number, mine, wanted, k, *more: [
                {"values": np.full(2, s.index), "top_tokens": s.index, "top_log_probs": k} for s in mine
            ]
        }
    )
    assert [row[0] for row in asyncio.run(made.values(samples()))] == list(range(8))
    assert asyncio.run(made.top_log_probs(samples(), 3)) == [TopLogProbs(n, 3) for n in range(8)]


def test_weights_that_are_sent_between_steps_are_called_what_they_will_be(group):
    made = pushed(group({"learn": learn}))

    async def main():
        await made.resend()
        before = made.engines.version
        await made.learn(samples(), 3)
        await made.resend()
        return before, made.engines.version

    assert asyncio.run(main()) == (3, 4)
