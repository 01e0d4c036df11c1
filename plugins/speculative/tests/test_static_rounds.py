"""Rounds in static buffers against steps with drafts that are launched one by one; without a GPU the same rounds run without being recorded."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from miles_core.engine import Request, Sampling
from miles_embedded import StaticCall, active_context, load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.graphs import Graphs
from miles_embedded.engine.settings import Settings
from miles_speculative.async_rounds import use_rounds
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import attach
from miles_speculative.lookahead import Auto, Lookahead

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


def make_engine(checkpoint, static, lookahead=None, draft=None, dtype="float32", device="cpu", **settings):
    """An engine that drafts with the checkpoint's MTP layer, by default three tokens per step."""
    model = load_model(checkpoint, dtype, device)
    engine = EmbeddedEngine(model, Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1], **settings))
    engine.decoder = SpeculativeDecoder(draft or attach(model, checkpoint), lookahead or Lookahead(3))
    if static:
        use_rounds(engine, engine.decoder, used=True)
    return engine


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def requests(**more):
    """Rows that share prompts and end at different times, by length and by the end token."""
    return [
        Request(p, Sampling(3 + 5 * k, temperature=0.9, **more), key=10 * i + k)
        for i, p in enumerate(PROMPTS)
        for k in range(4)
    ]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a.tokens, a.finish, a.text, a.weight_versions) == (b.tokens, b.finish, b.text, b.weight_versions)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


def accepted(responses):
    return [sum(v for n, v in r.metrics.items() if n.startswith("kept_")) for r in responses]


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "deepseek_v3", "glm4_moe"])
def test_a_family_generates_the_same(mtp_checkpoint, family):
    checkpoint = mtp_checkpoint(family)
    engine = make_engine(checkpoint, True, max_running_requests=5)
    got = generate(engine, requests())
    expected = generate(make_engine(checkpoint, False, max_running_requests=5), requests())
    assert_same(got, expected)
    assert accepted(got) == accepted(expected) and 0 < sum(accepted(got)) < sum(r.metrics["drafted"] for r in got)
    assert engine.async_steps.used and not engine.async_steps.refused
    assert engine.runner.cache.rows == engine.runner.cache.prefixes.size == 0


def test_greedy_and_truncated_rows_beside_others(mtp_checkpoint, caplog):
    mixed = [
        Request([3, 4], Sampling(12, temperature=t, ignore_eos=True), key=i) for i, t in enumerate((0.0, 1.3, 1.0))
    ]
    # while the truncated row runs, no step is static; the others continue in static rounds
    cut = [*mixed, Request([5], Sampling(5, top_k=3), key=3, extras=frozenset({"sampling_support"}))]
    for sent in (mixed, mixed[:1], cut):
        got = generate(make_engine(mtp_checkpoint(), True), sent)
        expected = generate(make_engine(mtp_checkpoint(), False), sent)
        assert_same(got, expected)
        assert accepted(got) == accepted(expected)
        assert [s.tolist() for s in got[-1].extras.get("sampling_support", ())] == [
            s.tolist() for s in expected[-1].extras.get("sampling_support", ())
        ]
    assert len([m for m in caplog.messages if "top-k or top-p decode without CUDA graphs" in m]) == 1


def test_the_next_round_is_launched_before_the_last_is_read(mtp_checkpoint):
    engine = make_engine(mtp_checkpoint(), True)
    order, run, read = [], engine.async_steps.graphs.run, engine.async_steps._read
    engine.async_steps._compared = True
    engine.async_steps.graphs.run = lambda shape: (order.append("launch"), run(shape))[1]
    engine.async_steps._read = lambda *given: (order.append("read"), read(*given))[1]
    generate(engine, [Request([3, 4], Sampling(20, ignore_eos=True), key=i) for i in range(3)])
    rounds = order.count("read")
    assert order[:5] == ["launch", "launch", "read", "launch", "read"] and 5 <= rounds <= 20


@pytest.mark.parametrize("most", [3, 11])
def test_rows_that_join_and_leave_keep_what_is_theirs(mtp_checkpoint, most):
    """Slots move while a round is in flight; a row's own text does not depend on the others."""
    budget = (9, 3, 15, 2, 7, 4, 18, 6, 11)
    sent = [Request([3 + i % 2, 4], Sampling(n, ignore_eos=True), key=i) for i, n in enumerate(budget)]
    got = generate(make_engine(mtp_checkpoint(), True, max_running_requests=most), sent)
    alone = [generate(make_engine(mtp_checkpoint(), False), [r])[0] for r in sent]
    assert_same(got, alone)
    assert accepted(got) == accepted(alone)


class Alternating(Lookahead):
    """Drafts a different number of tokens in each step, with runs of steps without drafts."""

    def __init__(self, numbers):
        super().__init__(max(numbers))
        self.numbers = numbers

    @property
    def rests(self):
        return True

    def choose(self, rows):
        self.steps += 1
        return self.numbers[self.steps % len(self.numbers)]


class Prepared(Graphs):
    """Graphs without a GPU: a step has to be prepared before it runs, and is then launched operation by operation."""

    def __init__(self, graphs):
        super().__init__(graphs.runner, graphs.step, tuple)
        self.records = True

    def prepare(self, shape):
        if not self.ready(shape):
            self.step(shape)
            if not self.current:
                self.clear()
            self._recorded[shape] = ()

    def run(self, shape):
        assert self.ready(shape)
        return self.step(shape)


class Replayed(Alternating):
    """Drafts the numbers of tokens of earlier rounds."""

    def choose(self, rows):
        return self.numbers.pop(0)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("lookahead", [Lookahead, lambda k: Alternating((2, 0, 0, 4, 1))], ids=["fixed", "changing"])
def test_rounds_that_are_recorded_first(mtp_checkpoint, monkeypatch, family, lookahead):
    """A round waits for the tokens of the last one until it is recorded, so fewer rows may be left when its number of drafts is chosen."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", tuple)
    engine = make_engine(mtp_checkpoint(family), True, lookahead(3))
    engine.async_steps.graphs = Prepared(engine.async_steps.graphs)
    rounds, read = [], engine.async_steps._read
    engine.async_steps._read = lambda launched, *more: (rounds.append(launched.shape), read(launched, *more))[1]
    got = generate(engine, requests(ignore_eos=True))
    assert len(engine.async_steps.graphs._recorded) > 1
    again = Replayed([shape.drafts for shape in rounds])
    expected = generate(make_engine(mtp_checkpoint(family), False, again), requests(ignore_eos=True))
    assert_same(got, expected)
    assert accepted(got) == accepted(expected) and not again.numbers


def test_a_changing_number_of_drafts(mtp_checkpoint):
    """What the draft has read does not depend on where hidden states wait for it, so as many drafts are accepted."""
    sent = [Request([5, 9, 3 + i % 2], Sampling(40, ignore_eos=True), key=i) for i in range(4)]
    got = generate(make_engine(mtp_checkpoint(), True, Alternating((2, 0, 0, 4, 1))), sent)
    expected = generate(make_engine(mtp_checkpoint(), False, Alternating((2, 0, 0, 4, 1))), sent)
    assert_same(got, expected)
    assert accepted(got) == accepted(expected)


def test_more_tokens_without_drafts_than_hidden_states_are_kept(mtp_checkpoint):
    """The draft never reads the oldest of these tokens. This costs acceptance, not text."""
    sent = [Request([5, 9, 3 + i % 2], Sampling(60, temperature=0.0, ignore_eos=True), key=i) for i in range(4)]
    engine = make_engine(mtp_checkpoint(), True, Alternating((3, 2, 3, *[0] * 20)))
    got = generate(engine, sent)
    assert engine.async_steps.batch.waiting < 20 and all(r.metrics["drafted"] > 15 for r in got)
    assert_same(got, generate(make_engine(mtp_checkpoint(), False), sent))


def test_auto_chooses_among_static_rounds(mtp_checkpoint):
    engine = make_engine(mtp_checkpoint(), True, Auto(3), max_running_requests=3)
    sent = [Request([5, 9, 3], Sampling(50, temperature=0.0, ignore_eos=True), key=i) for i in range(5)]
    expected = generate(make_engine(mtp_checkpoint(), False, max_running_requests=3), sent)
    got = generate(engine, sent)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert engine.decoder.lookahead.costs[2].known.keys() > {0}
    assert sum(r.metrics["lookahead"] for r in got) > 0 and sum(r.metrics["plain_seconds"] for r in got) > 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_amid_a_round(mtp_checkpoint, mode):
    """The round in flight is discarded and computed again, with the same result."""
    sent = [Request([3, 4, 5], Sampling(24, ignore_eos=True), key=i) for i in range(3)]

    def run(static):
        engine = make_engine(mtp_checkpoint(), static)

        async def main():
            tasks = [asyncio.ensure_future(engine.generate(r)) for r in sent]
            while not engine.rows or len(engine.rows[0].response) < 5:
                await asyncio.sleep(0)
            await engine.pause(mode)
            await engine.resume()
            return await asyncio.gather(*tasks)

        return asyncio.run(main())

    got, expected = run(True), run(False)
    assert_same(got, expected)
    assert accepted(got) == accepted(expected)


def test_aborted_and_cancelled_rows_leave_the_others_as_they_are(mtp_checkpoint):
    engine = make_engine(mtp_checkpoint(), True)
    sent = [Request([3, 4, 5], Sampling(30, ignore_eos=True), key=i) for i in range(4)]

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in sent]
        while not engine.rows or len(engine.rows[0].response) < 4:
            await asyncio.sleep(0)
        await engine.abort([1])
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, aborted, cancelled, last = asyncio.run(main())
    expected = generate(make_engine(mtp_checkpoint(), False), sent)
    assert_same([first, last], [expected[0], expected[3]])
    assert aborted.finish == "abort" and aborted.tokens == expected[1].tokens[: len(aborted.tokens)]
    assert isinstance(cancelled, asyncio.CancelledError)


def test_what_modules_record_is_that_of_accepted_tokens(mtp_checkpoint):
    def recording(static):
        engine = make_engine(mtp_checkpoint("llama"), static)

        def see(module, args, output):
            found = active_context()
            if found is not None:
                found.extras["seen"] = output[:, :3] if output.dim() == 2 else output[0, :, :3]

        engine.model.model.layers[1].mlp.register_forward_hook(see)
        return engine, [Request(p, Sampling(9), key=i, extras=frozenset({"seen"})) for i, p in enumerate(PROMPTS * 2)]

    got, expected = generate(*recording(True)), generate(*recording(False))
    assert_same(got, expected)
    for a, b, prompt in zip(got, expected, PROMPTS * 2, strict=True):
        assert len(a.extras["seen"]) == len(prompt) + len(a.tokens) - 1
        np.testing.assert_allclose(a.extras["seen"], b.extras["seen"], atol=2e-5)


def test_a_static_round_that_computes_something_else_is_not_used(mtp_checkpoint, monkeypatch, caplog):
    attend = StaticCall.attend
    monkeypatch.setattr(StaticCall, "attend", lambda *args: attend(*args) * 1.5)
    engine = make_engine(mtp_checkpoint(), True)
    with caplog.at_level(logging.WARNING):
        got = generate(engine, requests())
    assert "differs from a plain one" in engine.async_steps.refused and engine.async_steps.refused in caplog.text
    assert_same(got, generate(make_engine(mtp_checkpoint(), False), requests()))


def test_the_context_is_never_exceeded(mtp_checkpoint):
    engine = make_engine(mtp_checkpoint(), True, max_context=12)
    positions, run = [], engine.runner.run

    def watched(ids, where, call, inputs=None):
        positions.append(int(where.max()))
        return run(ids, where, call, inputs)

    engine.runner.run = watched
    sent = [Request([3] * n, Sampling(100, ignore_eos=True), key=n) for n in (2, 9)]
    got = generate(engine, sent)
    assert [len(r.tokens) for r in got] == [10, 3] and max(positions) < 12
    assert_same(got, generate(make_engine(mtp_checkpoint(), False, max_context=12), sent))


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("lookahead", [Lookahead, lambda k: Alternating((2, 0, 0, 4, 1))], ids=["fixed", "changing"])
def test_a_graph_computes_what_its_round_computes(mtp_checkpoint, family, lookahead):
    """On a GPU: recorded and replayed against the same rounds launched kernel by kernel, bit for bit.

    Both runs record, so both choose the same shapes. A run without recordings pads batches to other sizes, which rounds differently, and
    chooses other numbers of drafts (see ``test_rounds_that_are_recorded_first``), which samples other tokens."""

    def run(replays):
        engine = make_engine(mtp_checkpoint(family), True, lookahead(3), dtype="bfloat16", device="cuda")
        graphs = engine.async_steps.graphs
        launch, shapes = graphs.run if replays else graphs.step, []
        graphs.run = lambda shape: (shapes.append(shape), launch(shape))[1]
        return engine, shapes, generate(engine, requests(ignore_eos=True))

    (engine, replayed, got), (_, launched, expected) = run(True), run(False)
    assert replayed == launched
    assert not engine.async_steps.refused and engine.async_steps.graphs._recorded
    assert [(r.tokens, r.log_probs) for r in got] == [(r.tokens, r.log_probs) for r in expected]
    assert accepted(got) == accepted(expected) and sum(accepted(got)) > 0


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_a_gpu_generates_the_same_with_graphs(mtp_checkpoint, family):
    engine, plain = (
        make_engine(mtp_checkpoint(family), static, dtype="float32", device="cuda") for static in (True, False)
    )
    got, expected = (generate(e, requests()) for e in (engine, plain))
    assert not engine.async_steps.refused or family != "llama"  # float32 experts need the host, see test_async_steps.py
    assert_same(got, expected)
    assert accepted(got) == accepted(expected)
