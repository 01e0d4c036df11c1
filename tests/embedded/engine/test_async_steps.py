"""Static steps, launched one ahead, against plain ones. Without a GPU the same steps run without being recorded."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from miles_core.contracts.engine import Request, Sampling
from miles_core.errors import NonFiniteError
from miles_embedded.engine.decoder import AsyncSteps
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.static_attention import StaticCall
from miles_embedded.engine.static_step import padded_rows
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.load import load_model
from miles_testing.stored import stored_units
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]
#: Families whose steps need the host, and what the log says about them.
HOST = {"deepseek_v32": "an indexer chooses the keys of its attention"}


def letters(tokens):
    return "".join(chr(48 + t) for t in tokens)


def make(checkpoint, ahead, model=None, **settings):
    engine = EmbeddedEngine(model or load_model(checkpoint), Settings(letters, eos=[1], **settings))
    engine.async_steps = AsyncSteps(engine, used=ahead)
    return engine


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def requests(**more):
    """Rows that share prompts and end at different times, by length and by the end token."""
    return [
        Request(p, Sampling(3 + 4 * k, temperature=0.9, **more), key=10 * i + k)
        for i, p in enumerate(PROMPTS)
        for k in range(4)
    ]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a.tokens, a.finish, a.text, a.weight_versions) == (b.tokens, b.finish, b.text, b.weight_versions)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


@pytest.fixture(scope="module", params=[*FAMILIES, *ROUTER_FAMILIES])
def family(request, tmp_path_factory):
    checkpoint = tiny_checkpoint(request.param, tmp_path_factory.mktemp("family") / request.param)
    return request.param, checkpoint


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("small"))


def test_a_family_generates_the_same(family, caplog):
    name, checkpoint = family
    engine = make(checkpoint, ahead=True, max_running_requests=5)
    with caplog.at_level(logging.WARNING):
        got = generate(engine, requests())
    assert_same(got, generate(make(checkpoint, ahead=False, max_running_requests=5), requests()))
    assert engine.async_steps.refused == HOST.get(name, "")
    assert [m for m in caplog.messages if "without CUDA graphs" in m and HOST.get(name, "") in m] or name not in HOST
    assert engine.runner.cache.rows == 0


def test_greedy_and_truncated_rows_beside_others(small):
    mixed = [
        Request([3, 4], Sampling(9, temperature=0.0), key=0),
        Request([3, 4], Sampling(7, temperature=1.3), key=1),
        Request([5], Sampling(6), key=2),
    ]
    cut = [*mixed, Request([5], Sampling(5, top_k=3), key=3, extras=frozenset({"sampling_support"}))]
    for sent in (mixed, mixed[:1], cut):
        engine, plain = make(small, ahead=True), make(small, ahead=False)
        got, expected = generate(engine, sent), generate(plain, sent)
        assert_same(got, expected)
        for a, b in zip(got, expected, strict=True):
            for x, y in zip(a.extras.get("sampling_support", ()), b.extras.get("sampling_support", ()), strict=True):
                np.testing.assert_array_equal(x, y)
        assert not engine.async_steps.refused


def test_the_next_step_is_launched_before_the_last_is_read(small):
    engine = make(small, ahead=True)
    order, run, read = [], engine.async_steps.graphs.run, engine.async_steps._read
    engine.async_steps.graphs.run = lambda shape: (shape.draws and order.append("launch"), run(shape))[1]
    engine.async_steps._read = lambda launched, rows: (order.append("read"), read(launched, rows))[1]
    generate(engine, [Request([3, 4], Sampling(6, ignore_eos=True), key=i) for i in range(3)])
    # five steps follow the first token; the last is known to end all rows, so none is launched ahead of it
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_rows_that_leave_do_not_hold_up_the_others(small):
    """Slots move, padding changes, and only what joins is read from the host."""
    engine = make(small, ahead=True)
    fills, fill = [], engine.async_steps.batch.fill
    engine.async_steps.batch.fill = lambda *given: (fills.append(len(given[0])), fill(*given))[1]
    sent = [Request([3 + i % 2, 4], Sampling(4 + 3 * (i * 5 % 11), ignore_eos=True), key=i) for i in range(11)]
    got = generate(engine, sent)
    assert set(fills) == {11}  # once to compare, once to begin
    assert_same(got, [generate(make(small, ahead=False), [r])[0] for r in sent])


def test_a_batch_that_changes_reads_nothing_but_lengths_from_the_host(small):
    """Rows that join while a step is under way, and rows whose slots move, go on with their own tokens."""
    budget = (9, 3, 5, 2, 7, 4, 8)
    sent = [Request([3 + i % 2, 4], Sampling(n, ignore_eos=True), key=i) for i, n in enumerate(budget)]
    got = generate(make(small, ahead=True, max_running_requests=3), sent)
    assert_same(got, [generate(make(small, ahead=False), [r])[0] for r in sent])
    assert [len(r.tokens) for r in got] == list(budget)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_between_two_steps(small, tmp_path, mode):
    other = tiny_checkpoint("qwen3", tmp_path / "other", seed=5)
    sent = [Request([3, 4, 5], Sampling(12, ignore_eos=True), key=i) for i in range(3)]

    def run(ahead):
        engine = make(small, ahead)

        async def main():
            tasks = [asyncio.ensure_future(engine.generate(r)) for r in sent]
            while not engine.rows or len(engine.rows[0].response) < 5:
                await asyncio.sleep(0)
            await engine.pause(mode)
            await engine.update_weights(stored_units(other), 3)
            await engine.resume()
            return await asyncio.gather(*tasks)

        return asyncio.run(main())

    got, expected = run(True), run(False)
    assert_same(got, expected)
    assert {v for r in got for _, v in r.weight_versions} == {-1, 3}


def test_aborted_and_cancelled_rows_leave_the_others_as_they_are(small):
    engine = make(small, ahead=True)
    sent = [Request([3, 4, 5], Sampling(20, ignore_eos=True), key=i) for i in range(4)]

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in sent]
        while not engine.rows or len(engine.rows[0].response) < 4:
            await asyncio.sleep(0)
        await engine.abort([1])
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, aborted, cancelled, last = asyncio.run(main())
    expected = generate(make(small, ahead=False), sent)
    assert_same([first, last], [expected[0], expected[3]])
    assert aborted.finish == "abort" and aborted.tokens == expected[1].tokens[: len(aborted.tokens)]
    assert isinstance(cancelled, asyncio.CancelledError)
    assert engine.runner.cache.rows == engine.runner.cache.prefixes.size == 0


def test_what_modules_record_is_the_same(small):
    def recording(ahead):
        from miles_embedded.model.call import active_context

        engine = make(small, ahead)

        def see(module, args, output):
            found = active_context()
            if found is not None:
                found.extras["seen"] = output[:, :3] if output.dim() == 2 else output[0, :, :3]

        engine.model.model.layers[1].mlp.register_forward_hook(see)
        return engine, [Request(p, Sampling(6), key=i, extras=frozenset({"seen"})) for i, p in enumerate(PROMPTS * 2)]

    got, expected = generate(*recording(True)), generate(*recording(False))
    assert_same(got, expected)
    for a, b, prompt in zip(got, expected, PROMPTS * 2, strict=True):
        assert len(a.extras["seen"]) == len(prompt) + len(a.tokens) - 1
        np.testing.assert_allclose(a.extras["seen"], b.extras["seen"], atol=2e-5)


def test_weights_that_are_not_finite_are_named(small):
    model = load_model(small)
    engine = make(small, True, model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp"):
        generate(engine, requests())


def test_a_static_step_that_computes_something_else_is_not_used(small, monkeypatch, caplog):
    attend = StaticCall.attend
    monkeypatch.setattr(StaticCall, "attend", lambda *args: attend(*args) * 1.5)
    engine = make(small, ahead=True)
    got = generate(engine, requests())
    assert "differs from a plain one" in engine.async_steps.refused and engine.async_steps.refused in caplog.text
    assert_same(got, generate(make(small, ahead=False), requests()))


def test_the_context_is_never_exceeded(small):
    engine = make(small, ahead=True, max_context=12)
    positions, run = [], engine.runner.run

    def watched(ids, where, call, inputs=None):
        positions.append(int(where.max()))
        return run(ids, where, call, inputs)

    engine.runner.run = watched
    got = generate(engine, [Request([3] * n, Sampling(100, ignore_eos=True), key=n) for n in (2, 9)])
    assert [len(r.tokens) for r in got] == [10, 3] and max(positions) < 12


def test_padding_is_small():
    sizes = {padded_rows(n) for n in range(1, 513)}
    assert len(sizes) == 15 and max(sizes) == 512
    assert all(n <= padded_rows(n) <= max(2 * n, 8) for n in range(1, 513))
    assert all(padded_rows(s) == s for s in sizes)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", [*FAMILIES, *ROUTER_FAMILIES])
def test_a_graph_computes_what_its_step_computes(name, tmp_path):
    """On a GPU: recorded and replayed against the same steps launched kernel by kernel, bit for bit."""
    checkpoint = tiny_checkpoint(name, tmp_path)

    def run(records):
        engine = make(checkpoint, True, load_model(checkpoint, "bfloat16", "cuda"))
        engine.async_steps.graphs.records = records
        return engine, generate(engine, requests(ignore_eos=True))

    (engine, got), (_, expected) = run(True), run(False)
    assert engine.async_steps.refused == HOST.get(name, "")
    assert bool(engine.async_steps.graphs._recorded) == (name not in HOST)
    assert [(r.tokens, r.log_probs) for r in got] == [(r.tokens, r.log_probs) for r in expected]


@pytest.mark.gpu
@gpu
def test_a_gpu_generates_the_same_with_graphs(family):
    name, checkpoint = family
    engine, plain = (make(checkpoint, ahead, load_model(checkpoint, "float32", "cuda")) for ahead in (True, False))
    got, expected = (generate(e, requests()) for e in (engine, plain))
    # torch has no grouped product of float32 experts on a GPU: how many rows each gets is then needed on the host
    assert engine.async_steps.refused == HOST.get(name, "") or (
        engine.async_steps.refused and routed_blocks(engine.model)
    )
    assert_same(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of sm_90"
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_kernels_that_overlap_compute_the_same(name, tmp_path, monkeypatch):
    checkpoint, queried = tiny_checkpoint(name, tmp_path, num_hidden_layers=4), []
    sent = [Request(p, Sampling(64, ignore_eos=True), key=10 * i + k) for i, p in enumerate(PROMPTS) for k in range(8)]

    def run(overlaps):
        monkeypatch.setattr("miles_embedded.kernels.overlap._can_overlap", lambda x: queried.append(x) or overlaps)
        engine = make(checkpoint, True, load_model(checkpoint, "bfloat16", "cuda"))
        got = generate(engine, sent)
        assert engine.async_steps.graphs._recorded and not engine.async_steps.refused
        return [(r.tokens, r.log_probs) for r in got]

    found, launches = run(True), len(queried)
    assert launches > 0
    assert run(False) == found and len(queried) > launches
