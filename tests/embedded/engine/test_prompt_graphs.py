"""Prompts in static passes against plain ones. Without a GPU the same passes run without being recorded."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from miles_core.contracts.engine import Request, Sampling
from miles_embedded import active_context, decoder_layers
from miles_embedded.engine.decoder import PlainDecoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.prompt_graphs import most_tokens
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.static_prompts import MOST_TOKENS, PromptShape, StaticPromptCall, padded_tokens
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import operations_of, use_operations
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES, tiny_checkpoint

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15], list(range(3, 30))]
#: Families whose passes need the host, and what the log says about them.
HOST = {"deepseek_v32": "an indexer chooses the keys of its attention"}


def make(checkpoint, static, device="cpu", dtype="float32"):
    engine = EmbeddedEngine(load_model(checkpoint, dtype, device), Settings(str, cuda_graphs=device == "cuda"))
    engine.prompts.used = static
    return engine


def generate(engine, prompts=PROMPTS, tokens=4):
    async def main():
        asked = [
            Request(p, Sampling(tokens, ignore_eos=True), key=10 * i + k) for i, p in enumerate(prompts) for k in (0, 1)
        ]
        return await asyncio.gather(*[engine.generate(r) for r in asked])

    return asyncio.run(main())


def test_a_decoder_that_reads_prompts_sees_every_prompt_where_static_passes_are_enabled(small):
    class Reading(PlainDecoder):
        def prompts(self, engine, prompts):
            read.extend(prompts.tokens.tolist())

    read: list[int] = []
    engine = make(small, static=True)
    engine.decoder = Reading()
    generate(engine)
    assert sorted(read) == sorted(token for prompt in PROMPTS for token in prompt)


@pytest.fixture(scope="module", params=[*FAMILIES, *ROUTER_FAMILIES])
def family(request, tmp_path_factory):
    checkpoint = tiny_checkpoint(request.param, tmp_path_factory.mktemp("family") / request.param)
    return request.param, checkpoint


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("small"))


def count_passes(engine):
    """A list that receives the shape of every static pass."""
    shapes, run = [], engine.prompts._run
    engine.prompts._run = lambda *given: (shapes.append(given[-1]), run(*given))[1]
    return shapes


def test_a_family_generates_the_same(family):
    name, checkpoint = family
    engine, plain = make(checkpoint, True), make(checkpoint, False)
    passes = count_passes(engine)
    for prompts in (PROMPTS, PROMPTS[2:], PROMPTS[::-1]):
        for got, expected in zip(generate(engine, prompts), generate(plain, prompts), strict=True):
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.log_probs, expected.log_probs, atol=2e-5)
    assert engine.prompts.refused == HOST.get(name, "") and passes
    assert engine.prompts.used == engine.prompts._compared == (name not in HOST)


def attend_by_bounds(q, k, v, sequences, scaling):
    """What ``flash_forward`` computes, one sequence after the other."""
    bounds = sequences.queries.tolist()
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] == len(q) and sequences.causal
    out = torch.full_like(q, torch.nan)
    for start, end in pairwise(bounds):
        assert end - start <= sequences.longest_query == sequences.longest_key
        if start < end:
            part = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            found = scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=True)
            out[start:end] = found[0].transpose(0, 1)
    return out, None


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])  # whose values are narrower than its keys
def test_flash_attention_gets_the_bounds_of_the_prompts(name, tmp_path, monkeypatch):
    checkpoint = tiny_checkpoint(name, tmp_path)
    monkeypatch.setattr("miles_embedded.engine.static_prompts._runs_flash", lambda query: True)
    monkeypatch.setattr("miles_embedded.engine.static_prompts.flash_forward", attend_by_bounds)
    engine, plain = make(checkpoint, True), make(checkpoint, False)
    passes = count_passes(engine)
    for prompts in (PROMPTS, PROMPTS[::-1], [list(range(2, 18))]):  # 16 tokens have no padding
        for got, expected in zip(generate(engine, prompts), generate(plain, prompts), strict=True):
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.log_probs, expected.log_probs, atol=2e-5)
    assert [shape.tokens for shape in passes] == [48, 48, 16] and not engine.prompts.refused


def test_recorded_fields_are_kept(small):
    """Fields of prompts and responses, recorded by a hook on a module."""

    def run(static):
        engine = make(small, static)
        passes = count_passes(engine)
        layer = decoder_layers(engine.model)[0].mlp

        def record(module, args, output):
            active_context().extras["largest"] = output[0].amax(-1, keepdim=True)

        layer.register_forward_hook(record)
        asked = [Request(p, Sampling(3, ignore_eos=True), key=i, extras={"largest"}) for i, p in enumerate(PROMPTS)]

        async def main():
            return await asyncio.gather(*[engine.generate(r) for r in asked])

        return [r.extras["largest"] for r in asyncio.run(main())], passes

    (got, passes), (expected, none) = run(True), run(False)
    assert passes and not none and passes[0].names == {"largest"}
    for a, b, prompt in zip(got, expected, PROMPTS, strict=True):
        assert a.shape == b.shape == (len(prompt) + 2, 1)
        np.testing.assert_allclose(a, b, atol=2e-5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_a_shape_contains_its_prompts(lengths):
    shape, total = PromptShape.of(lengths, set()), sum(lengths)
    padding = shape.tokens - total
    assert 0 <= padding <= max(15, total / 4)
    assert shape.longest >= max(*lengths, padding) and shape.prompts >= len(lengths) + (padding > 0)
    assert shape == PromptShape.of(lengths[::-1], set())


def test_few_shapes_serve_all_lengths():
    assert len({padded_tokens(n) for n in range(1, MOST_TOKENS + 1)}) < 40
    assert all(padded_tokens(padded_tokens(n)) == padded_tokens(n) <= MOST_TOKENS for n in range(1, MOST_TOKENS + 1))


def test_prompts_of_other_tokens_and_free_slots_do_not_matter(small):
    """The padding writes to a free slot, not to one of a prompt that is in use."""
    engine, plain = make(small, True), make(small, False)
    for cached in (engine, plain):
        cached.runner.prefixes([list(range(3, 20))] * 7, set())  # 7 of 8 slots
    names = set()
    for cached in (engine, plain):
        slots = cached.runner.cache.add_prefixes([3])
        cached.hidden, _ = cached.prompts.fill([(4, 5, 6)], slots, names, [0])
    torch.testing.assert_close(engine.hidden, plain.hidden, atol=2e-5, rtol=1e-4)
    for key, slab in engine.runner.cache.prefixes.slabs.items():
        expected = plain.runner.cache.prefixes.slabs[key]
        torch.testing.assert_close(slab[:7, :, :17], expected[:7, :, :17])
        torch.testing.assert_close(slab[7, :, :3], expected[7, :, :3], atol=2e-5, rtol=1e-4)


def test_a_pass_with_more_tokens_is_a_plain_one(small):
    engine = make(small, True)
    passes = count_passes(engine)
    engine.prompts._most = 20
    generate(engine, [[3] * 20])
    assert len(passes) == 1
    generate(engine, [[3] * 21])
    assert len(passes) == 1 and engine.prompts.used and not engine.prompts.refused


@pytest.mark.parametrize("static", [False, True])
def test_a_replaced_attention_says_whether_it_takes_static_prompts(small, static):
    seen, expected = set(), generate(make(small, False))

    def attend(call, *rest):
        seen.add(type(call).__name__)
        return call.attend(*rest)

    if static:
        attend.static_prompts = True
    engine = make(small, True)
    use_operations(engine.model, replace(operations_of(engine.model), attention=attend))
    assert [answer.tokens for answer in generate(engine)] == [answer.tokens for answer in expected]
    assert not engine.prompts.refused and ("StaticPromptCall" in seen) is static


def test_a_large_model_has_passes_of_fewer_tokens():
    assert most_tokens(0) == most_tokens(9 * 10**8) == MOST_TOKENS
    assert most_tokens(8 * 10**9) == 1000


@pytest.mark.parametrize("wrong", ["attention", "keys"])
def test_a_wrong_pass_is_noticed_and_not_used(small, monkeypatch, caplog, wrong):
    engine, attend = make(small, True), StaticPromptCall.attend
    if wrong == "attention":
        monkeypatch.setattr(StaticPromptCall, "attend", lambda self, *given: attend(self, *given) * 30)
    else:
        monkeypatch.setattr(StaticPromptCall, "write", lambda self, slab, entries: None)
    with caplog.at_level(logging.INFO):
        got = generate(engine)
    expected = generate(make(small, False))
    assert [(r.tokens, r.log_probs) for r in got] == [(r.tokens, r.log_probs) for r in expected]
    assert ("differs from a plain one" if wrong == "attention" else "other keys or values") in engine.prompts.refused
    assert "without CUDA graphs" in caplog.text


def test_a_failing_pass_is_replaced_by_a_plain_one(small, monkeypatch, caplog):
    engine = make(small, True)

    def fail(self, *given):
        raise RuntimeError("out of luck\nmore")

    monkeypatch.setattr(StaticPromptCall, "attend", fail)
    with caplog.at_level(logging.WARNING):
        got = generate(engine)
    assert [r.tokens for r in got] == [r.tokens for r in generate(make(small, False))]
    assert not engine.prompts.used and engine.prompts.refused == "out of luck"
    assert len([m for m in caplog.messages if "which is slower: out of luck" in m]) == 1


def test_masks_of_many_tokens_are_not_built(small, monkeypatch, caplog):
    engine = make(small, True)
    monkeypatch.setattr("miles_embedded.engine.static_prompts._MOST_MASKED", 32)
    generate(engine, [[3] * 20])
    assert not engine.prompts.refused
    with caplog.at_level(logging.INFO):
        generate(engine, [[3] * 40])
    assert (
        "48 tokens of prompts are computed without CUDA graphs: attention with a mask over more than 32" in caplog.text
    )
    assert engine.prompts.used and not engine.prompts.refused
    passes = count_passes(engine)
    generate(engine, [[3] * 41])
    generate(engine, [[3] * 21])
    assert [shape.tokens for shape in passes] == [32]


class Recorder:
    """Records shapes without a GPU; a replay runs the step."""

    def __init__(self, graphs):
        self.recorded = []
        graphs.ready = lambda shape: shape in self.recorded
        graphs.prepare = lambda shape: self.recorded.append(shape) if shape not in self.recorded else None
        clear = graphs.clear
        graphs.clear = lambda: (self.recorded.clear(), clear())[1]


def test_a_shape_is_recorded_when_it_occurs_again(small, monkeypatch):
    engine = make(small, True)
    recorder = Recorder(engine.prompts.graphs)
    generate(engine, [[3] * 20])
    assert [shape.tokens for shape in recorder.recorded] == [32]  # to be compared with a plain pass
    generate(engine, [[3] * 10])
    assert [shape.tokens for shape in recorder.recorded] == [32]
    generate(engine, [[4] * 11])
    assert [shape.tokens for shape in recorder.recorded] == [32, 16]
    generate(engine, [[3] * 60])  # the cache grows: what was recorded has other addresses
    assert not recorder.recorded
    generate(engine, [[4] * 18])
    generate(engine, [[5] * 18])
    assert [shape.tokens for shape in recorder.recorded] == [32]
    monkeypatch.setattr("miles_embedded.engine.prompt_graphs._MOST_GRAPHS", 0)
    generate(engine, [[4] * 10])
    generate(engine, [[5] * 10])
    assert [shape.tokens for shape in recorder.recorded] == [32]
    asyncio.run(engine.sleep(["cache"]))
    assert not recorder.recorded and not engine.prompts._seen


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", [*FAMILIES, *ROUTER_FAMILIES])
def test_a_graph_computes_what_its_pass_computes(name, tmp_path):
    """On a GPU: recorded and replayed against the same passes launched kernel by kernel, bit for bit."""
    checkpoint = tiny_checkpoint(name, tmp_path)

    def run(records):
        engine = make(checkpoint, True, "cuda", "bfloat16")
        engine.prompts.graphs.records = records
        got = [generate(engine, prompts) for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[1:], PROMPTS[:3], PROMPTS)]
        return engine, [(r.tokens, r.log_probs) for part in got for r in part]

    (engine, got), (_, expected) = run(True), run(False)
    assert engine.prompts.refused == HOST.get(name, "")
    assert bool(engine.prompts.graphs._recorded) == (name not in HOST)
    assert got == expected


@pytest.mark.gpu
@gpu
def test_a_gpu_generates_the_same_with_graphs(family):
    name, checkpoint = family
    engine, plain = (make(checkpoint, static, "cuda") for static in (True, False))
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS, PROMPTS):
        for got, expected in zip(generate(engine, prompts), generate(plain, prompts), strict=True):
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.log_probs, expected.log_probs, atol=2e-5)
    # torch has no grouped product of float32 experts on a GPU: how many rows each gets is then needed on the host
    assert engine.prompts.refused == HOST.get(name, "") or (engine.prompts.refused and routed_blocks(engine.model))
