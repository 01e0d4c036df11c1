"""Steps with drafts over static buffers against those from Python. Without a GPU the same steps run without being recorded."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from miles_core.engine import Request, Sampling
from miles_embedded import load_model
from miles_embedded.engine.decoder import StepsAhead
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative import static_drafts
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import attach
from miles_speculative.lookahead import Lookahead


class Cycle(Lookahead):
    """0, 1, 2 ... drafts in turns."""

    def choose(self, rows):
        self.steps += 1
        return self.steps % (self.k + 1)


def make_engine(checkpoint, lookahead, static, **settings):
    model = load_model(checkpoint)
    made = Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1], **settings)
    made.decoder = SpeculativeDecoder(attach(model, checkpoint), lookahead)
    engine = EmbeddedEngine(model, made)
    engine.ahead = StepsAhead(engine, used=static)
    return engine


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def requests(**more):
    """Rows that share prompts and end at different times; some are greedy."""
    prompts = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]
    return [
        Request(p, Sampling(3 + 4 * k, temperature=0.9 * (k != 2), **more), key=10 * i + k)
        for i, p in enumerate(prompts)
        for k in range(4)
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "deepseek_v3"])
@pytest.mark.parametrize("kind", [Lookahead, Cycle])
def test_static_steps_emit_the_same(mtp_checkpoint, family, kind):
    checkpoint = mtp_checkpoint(family)
    engine = make_engine(checkpoint, kind(3), static=True, max_running_requests=5)
    got = generate(engine, requests())
    expected = generate(make_engine(checkpoint, kind(3), static=False, max_running_requests=5), requests())
    assert engine.decoder._static.refused == "" and engine.decoder._static._checked
    for a, b in zip(got, expected, strict=True):
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)
    assert sum(r.metrics["kept_1"] for r in got) > 0
    if kind is Lookahead:  # without drafts, tokens that the draft has not processed are kept up to another number
        assert [r.metrics["kept_1"] for r in got] == [r.metrics["kept_1"] for r in expected]


def test_truncated_rows_are_sampled_on_the_host(mtp_checkpoint):
    checkpoint, asked = mtp_checkpoint("llama"), [*requests(), *requests(top_k=4)[:3]]
    engine = make_engine(checkpoint, Lookahead(2), static=True)
    got = generate(engine, asked)
    expected = generate(make_engine(checkpoint, Lookahead(2), static=False), asked)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert engine.decoder._static._checked  # after the truncated rows ended


def test_a_step_that_differs_is_refused(mtp_checkpoint, monkeypatch, caplog):
    checkpoint = mtp_checkpoint("llama")
    monkeypatch.setattr(static_drafts, "TOLERANCE", {torch.float32: -1.0})
    engine = make_engine(checkpoint, Lookahead(2), static=True)
    with caplog.at_level(logging.WARNING):
        got = generate(engine, requests())
    assert "differs from a plain one" in engine.decoder._static.refused
    assert any("drafts without CUDA graphs" in message for message in caplog.messages)
    expected = generate(make_engine(checkpoint, Lookahead(2), static=False), requests())
    assert [r.tokens for r in got] == [r.tokens for r in expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_have_the_models_log_probs(mtp_checkpoint):
    checkpoint = mtp_checkpoint("llama")
    model = load_model(checkpoint, "bfloat16", "cuda")
    settings = Settings(lambda tokens: "", eos=[1], decoder=SpeculativeDecoder(attach(model, checkpoint), Lookahead(3)))
    engine = EmbeddedEngine(model, settings)
    gaps = []
    for response, request in zip(generate(engine, requests()), requests(), strict=True):
        scored = asyncio.run(engine.score([request.tokens + response.tokens], request.sampling.temperature or 1.0))[0]
        gaps.append(np.abs(np.array(response.log_probs) - scored[len(request.tokens) - 1 :]).mean())
    assert engine.decoder._static.refused == "" and engine.decoder._static.graphs._recorded
    assert np.mean(gaps) < 0.1  # bfloat16


class Idle(Cycle):
    """Drafting is off for the first steps."""

    @property
    def idle(self):
        return self.steps < 6

    def choose(self, rows):
        drafts = super().choose(rows)
        return 0 if self.idle else drafts


def test_greedy_text_is_the_same_where_drafting_was_off_at_first(mtp_checkpoint):
    checkpoint, greedy = mtp_checkpoint("llama"), Sampling(24, temperature=0.0, ignore_eos=True)
    asked = [Request([3 + i, 7, 3 + i, 7][: 2 + i % 3], greedy, key=i) for i in range(5)]
    engine = make_engine(checkpoint, Idle(3), static=True, max_running_requests=4)
    got = generate(engine, asked)
    expected = generate(make_engine(checkpoint, Lookahead(3), static=False, max_running_requests=4), asked)
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert engine.decoder._static._checked and sum(r.metrics["draft_steps"] for r in got) > 0
