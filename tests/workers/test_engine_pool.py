"""Several engines behind one, without any engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
import torch

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.weight_unit import Encoded
from miles_core.data.world import World
from miles_core.errors import MismatchError, WorkerLost
from miles_workers.engine_pool import EnginePool
from miles_workers.least_loaded import LeastLoaded
from miles_workers.weight_block import ALIGNMENT, read_block

NAMES = ("engine-0", "engine-1", "engine-2")


def request(group, key=0):
    return Request([1], Sampling(4), key=key, group=group)


def run(function):
    return asyncio.run(function())


def test_a_group_stays_together_and_the_idlest_engine_is_asked(recorded, build_info):
    gate = {}

    async def generate(number, request):
        await gate["open"].wait()
        return number, request.key

    async def main():
        gate["open"] = asyncio.Event()
        pool = EnginePool(recorded(NAMES, {"generate": generate}), build_info, 1)
        groups = [1, 1, 1, 2, 2, 3, 4, 3, 1]
        tasks = [asyncio.create_task(pool.generate(request(g, k))) for k, g in enumerate(groups)]
        await asyncio.sleep(0.01)
        gate["open"].set()
        where = [number for number, _ in await asyncio.gather(*tasks)]
        by_group = {g: {w for w, other in zip(where, groups, strict=True) if other == g} for g in groups}
        assert all(len(engines) == 1 for engines in by_group.values())
        assert by_group[1] | by_group[2] | by_group[3] == {0, 1, 2} and by_group[4] == by_group[3]
        assert not pool._groups and not pool._in_flight.load.total()

    run(main)


def test_other_calls_go_to_all_and_score_to_one(recorded, build_info):
    async def main():
        workers = recorded(NAMES, {"score": ["scores"]})
        pool = EnginePool(workers, build_info, 1)
        await pool.pause("abort")
        await pool.abort()
        await pool.resume()
        assert await pool.score([[1, 2]]) == ["scores"]
        assert [c[0] for c in workers.asked("pause")] == [0, 1, 2]
        assert workers.asked("abort")[2] == (2, "abort", None) and len(workers.asked("score")) == 1
        assert pool.capabilities == {"score"} and pool.model_facts() == {"a": 1}

    run(main)


def test_an_abort_reaches_only_the_engines_with_the_requests(recorded, build_info):
    async def generate(number, request):
        await asyncio.sleep(60)

    async def main():
        workers = recorded(NAMES, {"generate": generate})
        pool = EnginePool(workers, build_info, 1)
        tasks = [asyncio.create_task(pool.generate(request(key // 2, key))) for key in range(6)]
        await asyncio.sleep(0.01)
        for task in tasks[:2]:  # as a collection that has enough groups
            task.cancel()
        await asyncio.wait(tasks[:2])
        await pool.abort([0, 1, 99])
        await pool.abort([0, 1])
        assert workers.asked("abort") == [(0, "abort", [0, 1])]
        await pool.abort([2, 5])  # requests in flight
        assert workers.asked("abort")[1:] == [(1, "abort", [2]), (2, "abort", [5])]
        for task in tasks:
            task.cancel()

    run(main)


def test_a_choice_among_thousands_of_engines_looks_at_few():
    class Engines(set):
        looked = 0

        def __contains__(self, number):
            Engines.looked += 1
            return super().__contains__(number)

    engines, load, flights = Engines(range(4096)), LeastLoaded(), Counter()
    draw = random.Random(0)
    for _ in range(20_000):
        if flights and draw.random() < 0.5:
            number = draw.choice([*flights][:8])
            flights -= Counter([number])
            load.add(number, -1)
        else:
            number = load.choose(engines)
            flights[number] += 1
            load.add(number, 1)
    assert Engines.looked < 6 * 20_000  # a search of all engines looks at 40 million
    least = min(flights[number] for number in range(4096))
    assert load.choose(engines) == next(number for number in range(4096) if flights[number] == least)
    engines.discard(load.choose(engines))
    assert load.choose(engines) in engines and load.choose({7}) == 7


def test_weights_travel_in_blocks(recorded, build_info):
    units = [Encoded(f"w{n}", {f"w{n}": torch.full((4,), n, dtype=torch.float8_e4m3fn)}, "f8") for n in range(5)]

    async def main():
        workers = recorded(NAMES[:2])
        pool = EnginePool(workers, build_info, 2 * ALIGNMENT, World(1, 3))  # two weights in a block
        pool.push = 9
        await pool.update_weights(iter(units), 7)
        taken = [call[3:] for call in workers.asked("take") if call[0] == 0 and call[2] == 9]
        assert [call[:4] for call in taken] == [(1, 3, 0, 7), (1, 3, 1, 7), (1, 3, 2, 7)]
        read = [e for *_, table, data in taken for e in read_block(table, data)]
        assert [(e.name, e.format) for e in read] == [(e.name, "f8") for e in units]
        assert all(
            torch.equal(a.parts[a.name].view(torch.uint8), b.parts[b.name].view(torch.uint8))
            for a, b in zip(read, units, strict=True)
        )
        assert workers.asked("update") == [(0, "update", 9, 7, 1, 3, 3), (1, "update", 9, 7, 1, 3, 3)]

    run(main)


def test_a_block_is_on_its_way_while_the_next_is_packed(recorded, build_info):
    workers = recorded(NAMES[:2])

    def units():
        for n in range(3):
            assert len(workers.asked("take")) == 2 * max(n - 1, 0)  # a block is sent when the next weight does not fit
            yield Encoded("w", {"w": torch.zeros(4)})
        assert len(workers.asked("take")) == 4

    run(lambda: EnginePool(workers, build_info, 1).update_weights(units(), 0))
    assert len(workers.asked("take")) == 6


def test_units_are_exhausted_after_an_engine_is_lost(recorded, build_info):
    seen = []

    def units():
        for n in range(3):
            seen.append(n)
            yield Encoded("w", {"w": torch.zeros(4)})

    async def main():
        workers = recorded(NAMES)
        workers.dead = {1}
        with pytest.raises(WorkerLost, match="engine-1"):
            await EnginePool(workers, build_info, 1).update_weights(units(), 0)
        assert seen == [0, 1, 2] and not workers.asked("update")

    run(main)


def mended(pool, workers, resent):
    """The pool, with engines replaced as a runtime would."""

    async def replace(number, lost):
        await workers.restart(number)

    async def resend():
        resent.append(True)
        await pool.check_served(5)

    pool.replace_with(replace, resend)
    return pool


def test_requests_of_a_lost_engine_are_sent_again_and_it_comes_back_with_the_next_weights(recorded, build_info):
    async def main():
        workers, resent = (
            recorded(NAMES[:2], {"generate": lambda number, request: (number, request.key), "version": 5}),
            [],
        )
        pool = mended(EnginePool(workers, build_info, 1), workers, resent)
        workers.dead = {0}
        found = await asyncio.gather(*(pool.generate(request(g, g)) for g in range(6)))
        assert sorted(found) == [(1, key) for key in range(6)] and not resent
        await pool.whole()
        assert pool.serving == {1} and pool.replacements == 1
        await pool.check_served(5)
        assert pool.serving == {0, 1} and pool.version == 5

    run(main)


def test_when_no_engine_is_left_the_learner_sends_its_weights_at_once(recorded, build_info):
    async def main():
        workers, resent = recorded(NAMES[:1], {"generate": "done", "version": 5}), []
        pool = mended(EnginePool(workers, build_info, 1), workers, resent)
        await pool.rebuild("f8")
        await pool.pause("retract")
        workers.dead, workers.calls = {0}, []
        assert await pool.generate(request(0)) == "done" and resent == [True]
        # what the previous engine had received
        assert [c for c in workers.calls if c[1] in ("rebuild", "pause")] == [
            (0, "rebuild", "f8"),
            (0, "pause", "retract"),
        ]

    run(main)


def test_an_engine_that_may_not_be_replaced_fails_the_requests(recorded, build_info):
    async def main():
        workers = recorded(NAMES[:2], {"generate": "done"})
        pool = EnginePool(workers, build_info, 1)

        async def replace(number, lost):
            raise lost

        pool.replace_with(replace, replace)
        workers.dead = {0}
        with pytest.raises(WorkerLost, match=r"worker engine-0 was lost: it was killed"):
            await pool.generate(request(0))  # another engine does it
            await pool.whole()
        with pytest.raises(WorkerLost):
            await pool.generate(request(0))

    run(main)


def test_engines_that_serve_different_versions_are_named(recorded, build_info):
    async def main():
        pool = EnginePool(recorded(NAMES, {"version": lambda number: 4 - number // 2}), build_info, 1)
        with pytest.raises(MismatchError, match="version 4 was sent, but engine-2 serves 3"):
            await pool.check_served(4)

    run(main)
