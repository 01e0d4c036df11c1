"""The virtual engine against arithmetic by hand and against a loop over single decode steps."""

from __future__ import annotations

import asyncio
import random

import pytest

from miles_core.engine import Request, Sampling
from miles_planner.simulation.clock import VirtualLoop
from miles_planner.simulation.engine import VirtualEngine
from miles_planner.simulation.hardware import find_gpu
from miles_planner.simulation.ledger import Ledger
from miles_planner.simulation.lengths import Constant, Empirical, Lengths
from miles_planner.simulation.model_shape import ModelShape
from miles_planner.simulation.speed import BANDWIDTH, Curve, Roofline, Speed

BASE, PER_TOKEN = 0.01, 1e-5


class Listed(Lengths):
    """Lengths by sample."""

    def __init__(self, responses, prompt=10):
        super().__init__(Constant(1), Constant(prompt), max(responses), 1)
        self.listed = responses

    def response(self, sample):
        return self.listed[sample]


def run(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def make(responses, slots=8, unit=1, prefill=0.0, cache=float("inf"), per_token=PER_TOKEN):
    ledger = Ledger(Listed(responses), unit)
    speed = Speed(Curve((1, 8), (BASE, 2 * BASE), per_token), prefill, 0.0, 0.0, cache=cache)
    engine = VirtualEngine(speed, ledger, slots)
    engine.install(0)
    return engine, ledger


def request(key, ledger, units=0):
    most = ledger.units(ledger.lengths.longest)
    return Request([1], Sampling(max_new_tokens=most - units), key=key, group=key)


def step_by_step(responses, prompt=10):
    """Seconds until each of several requests that start together ends, one decode step at a time."""
    curve, now, done, ends = Curve((1, 8), (BASE, 2 * BASE)), 0.0, dict.fromkeys(range(len(responses)), 0), {}
    while done:
        now += curve.base(len(done)) + PER_TOKEN * sum(prompt + count for count in done.values())
        done = {key: count + 1 for key, count in done.items()}
        ends |= {key: now for key, count in done.items() if count == responses[key]}
        done = {key: count for key, count in done.items() if key not in ends}
    return [ends[key] for key in range(len(responses))]


def test_ends_are_those_of_single_steps():
    responses = [random.Random(0).randrange(50, 400) for _ in range(6)]

    async def ends():
        engine, ledger = make(responses)
        loop = asyncio.get_running_loop()

        async def one(key):
            response = await engine.generate(request(key, ledger))
            assert len(response.tokens) == responses[key] and response.finish in ("stop", "length")
            return loop.time()

        return await asyncio.gather(*(one(key) for key in range(len(responses))))

    # the sum over steps is replaced by an integral: half a step's growth of the context differs
    assert run(ends()) == pytest.approx(step_by_step(responses), rel=5e-3)


def test_an_aborted_response_continues_and_pays_for_its_prefix():
    async def times():
        engine, ledger = make([1000], unit=64, prefill=1e-3, per_token=0.0)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(engine.generate(request(0, ledger)))
        await asyncio.sleep(10 * 1e-3 + 300 * BASE)  # the prompt, and 300 of 1000 tokens
        engine.pause("abort")
        first = await task
        assert first.finish == "abort" and len(first.tokens) == 300 // 64
        engine.install(1)
        engine.resume()
        start = loop.time()
        second = await engine.generate(request(0, ledger, len(first.tokens)))
        assert len(first.tokens) + len(second.tokens) == -(-1000 // 64)
        assert first.weight_versions == [(0, 0)] and second.weight_versions == [(0, 1)]
        return loop.time() - start, ledger.generated

    seconds, generated = run(times())
    assert seconds == pytest.approx((10 + 300) * 1e-3 + 700 * BASE, rel=1e-6)
    assert generated == pytest.approx(1000, abs=0.01)


@pytest.mark.parametrize(("mode", "again"), [("in_place", 0), ("retract", 310e-3)])
def test_pauses_that_keep_requests(mode, again):
    async def finish():
        engine, ledger = make([1000], prefill=1e-3, per_token=0.0)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(engine.generate(request(0, ledger)))
        await asyncio.sleep(10 * 1e-3 + 300 * BASE)
        engine.pause(mode)
        await asyncio.sleep(5)
        engine.install(1)
        engine.resume()
        response = await task
        assert response.weight_versions == [(0, 0), (300, 1)] and len(response.tokens) == 1000
        return loop.time()

    assert run(finish()) == pytest.approx(0.01 + 1000 * BASE + 5 + again, rel=1e-6)


def test_slots_and_cache_bound_the_batch():
    async def finish(slots, cache):
        engine, ledger = make([100] * 4, slots=slots, cache=cache, per_token=0.0)
        await asyncio.gather(*(engine.generate(request(key, ledger)) for key in range(4)))
        assert engine._context == pytest.approx(0) and not engine.flights
        return asyncio.get_running_loop().time(), ledger.generated

    together = 100 * Curve((1, 8), (BASE, 2 * BASE)).base(4)
    assert run(finish(4, float("inf")))[0] == pytest.approx(together, rel=1e-6)
    assert run(finish(1, float("inf")))[0] == pytest.approx(4 * 100 * BASE, rel=1e-6)
    seconds, generated = run(finish(4, 250))  # all four join with 10 tokens each, and two complete ones fit
    assert 1.1 * together < seconds < 4 * 100 * BASE
    assert generated == pytest.approx(400, abs=0.1)  # a request that gave way keeps its tokens


def test_a_full_cache_ends_waits_shorter_than_the_clock_can_tell():
    """The time until the cache is full is rounded: what is left may take less than the resolution of the event loop's clock."""
    choose = random.Random(3)
    responses = [choose.randrange(5_000, 60_000) for _ in range(200)]

    async def count():
        engine, ledger = make(responses, slots=64, unit=1000, cache=700_037.0, per_token=3.7e-8)
        settle, calls = engine._settle, 0

        def counted():
            nonlocal calls
            calls += 1
            settle() if calls < 5_000 else engine.stop()  # which cancels the requests

        engine._settle = counted
        await asyncio.gather(*(engine.generate(request(key, ledger)) for key in range(len(responses))))
        return ledger.generated

    assert run(count()) == pytest.approx(sum(responses), rel=1e-6)


def test_an_engine_that_stops_cancels_its_requests():
    async def stopped():
        engine, ledger = make([100])
        task = asyncio.create_task(engine.generate(request(0, ledger)))
        await asyncio.sleep(0.1)
        engine.stop()
        await asyncio.wait([task])
        return task.cancelled(), ledger.running

    assert run(stopped()) == (True, 0)


def test_an_event_per_change_not_per_token():
    async def count():
        engine, ledger = make([100_000] * 8)
        loop, calls = asyncio.get_running_loop(), 0
        settle = engine._settle

        def count_and_settle():
            nonlocal calls
            calls += 1
            settle()

        engine._settle = count_and_settle
        await asyncio.gather(*(engine.generate(request(key, ledger)) for key in range(8)))
        return calls, loop.time()

    calls, seconds = run(count())
    assert calls < 8 and seconds > 1000


def test_lengths_of_samples_do_not_depend_on_the_order():
    lengths = Lengths(Empirical((1, 2, 3, 400)), Constant(7), 300, 4, correlation=0.5, seed=3)
    forward = [lengths.response(n) for n in range(100)]
    assert forward == [lengths.response(n) for n in reversed(range(100))][::-1]
    assert set(forward) == {1, 2, 3, 300}
    same = Lengths(Empirical(tuple(range(1, 1001))), Constant(7), 2000, 4, correlation=1.0)
    assert len({same.response(n) for n in range(4)}) == 1 < len({same.response(4 * n) for n in range(4)})


def test_an_engine_over_machines_waits_for_its_network():
    model = ModelShape(
        layers=100, parameters=1e9, expert_parameters=0.0, active_share=1.0, kv_bytes=0.0, attention_width=0.0
    )

    def floor(gpus, name, **given):
        decode = Roofline(model, find_gpu(name), gpus, **given)
        return decode.base(1) - model.parameters * 2 / (gpus * find_gpu(name).bandwidth * BANDWIDTH)

    assert floor(1, "H100") == pytest.approx(2.5e-3)
    assert floor(8, "H100") == pytest.approx(6e-3)
    assert floor(16, "H100") == pytest.approx(13.2e-3)
    assert floor(16, "GB200") == pytest.approx(6e-3)  # NVLink connects them
    assert floor(16, "H100", floor=1e-3) == pytest.approx(1e-3)
