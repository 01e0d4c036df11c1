"""The engine with drafts: the same greedy text, the same distribution, log-probs of the model itself."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from miles_core.engine import Request, Sampling
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative import decoder
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import attach
from miles_speculative.lookahead import Lookahead
from miles_speculative.tree import TreeDecoder


def make_engine(checkpoint, k=0, **settings):
    """An engine of the checkpoint; with ``k`` it drafts so many tokens with the checkpoint's MTP layer."""
    model = load_model(checkpoint)
    made = Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1], **settings)
    return EmbeddedEngine(model, made, SpeculativeDecoder(attach(model, checkpoint), Lookahead(k)) if k else None)


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "deepseek_v3", "glm4_moe"])
def test_greedy_text_is_the_same_and_log_probs_are_the_models(mtp_checkpoint, family):
    checkpoint = mtp_checkpoint(family)
    greedy = Sampling(24, temperature=0.0)
    requests = [Request([3 + i % 2, 7, 3 + i, 7][: 2 + i % 3], greedy, key=i) for i in range(7)]
    plain = generate(make_engine(checkpoint), requests)
    engine = make_engine(checkpoint, 3, max_running_requests=4)
    drafted = generate(engine, requests)
    assert [r.tokens for r in drafted] == [p.tokens for p in plain]
    metrics = [r.metrics for r in drafted]
    assert sum(m["kept_1"] for m in metrics) > 0  # some were right
    assert sum(m["kept_1"] for m in metrics) < sum(m["tried_1"] for m in metrics)  # and some were not
    for request, response in zip(requests, drafted, strict=True):
        scored = asyncio.run(engine.score([request.tokens + response.tokens]))[0]
        np.testing.assert_allclose(response.log_probs, scored[len(request.tokens) - 1 :], atol=1e-4)


@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, {"temperature": 1.5, "top_k": 6, "top_p": 0.9}], ids=str)
def test_drafts_do_not_change_the_distribution(mtp_checkpoint, sampling):
    """Every output of three tokens from a vocabulary of eight, counted, against what the model says."""
    checkpoint = mtp_checkpoint("qwen3_moe", vocab_size=8)
    count, prompt = 4000, [5, 3, 6]
    requests = [Request(prompt, Sampling(3, ignore_eos=True, **sampling), key=i) for i in range(count)]
    engine = make_engine(checkpoint, 2, max_running_requests=count)
    drafted = generate(engine, requests)
    kept = sum(r.metrics["kept_1"] for r in drafted) / sum(r.metrics["tried_1"] for r in drafted)
    assert 0.05 < kept < 0.95
    expected = outputs(engine, prompt, requests[0].sampling)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    found = Counter(tuple(r.tokens) for r in drafted)
    assert not set(found) - set(expected)
    common = [o for o, p in expected.items() if p * count >= 5]
    cells = [(found[o], expected[o] * count) for o in common]
    cells.append((count - sum(f for f, _ in cells), count - sum(e for _, e in cells)))
    chi2 = sum((f - e) ** 2 / max(e, 1) for f, e in cells)
    assert chi2 < len(cells) + 4 * (2 * len(cells)) ** 0.5


def outputs(engine, prompt, sampling):
    """Probability of every output, from scores of the model that no draft had a part in."""
    from miles_embedded.engine import sampling as draw

    params = draw.params_of([sampling])
    found, level = {}, {(): 1.0}
    for _ in range(sampling.max_new_tokens):
        _, hidden, _ = engine.runner.prefixes([[*prompt, *o] for o in level], set())
        dist = draw.distribution(engine.runner.head(hidden), params).log_probs.exp().tolist()
        engine.runner.clear()
        level = {
            (*o, t): p * q for (o, p), row in zip(level.items(), dist, strict=True) for t, q in enumerate(row) if q
        }
        found = level
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_tree_emits_what_plain_decoding_emits(mtp_checkpoint, family):
    checkpoint = mtp_checkpoint(family)
    samplings = [Sampling(22, temperature=t, top_k=k) for t, k in ((0.0, -1), (1.0, -1), (1.4, 5))]
    requests = [Request([3 + i % 2, 7, 3 + i, 7][: 2 + i % 3], samplings[i % 3], key=i) for i in range(9)]
    for request in requests:
        request.extras.add("sampling_support")
    plain = generate(make_engine(checkpoint), requests)
    engine = make_engine(checkpoint, 3, max_running_requests=5)
    engine.decoder = TreeDecoder(engine.decoder.draft, Lookahead(3), width=8)
    drafted = generate(engine, requests)
    assert [r.tokens for r in drafted] == [p.tokens for p in plain]
    for got, want in zip(drafted, plain, strict=True):
        np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-4)
        assert [s.tolist() for s in got.extras["sampling_support"]] == [
            s.tolist() for s in want.extras["sampling_support"]
        ]
    kept = [sum(r.metrics[f"kept_{d}"] for r in drafted) for d in (1, 2, 3)]
    assert kept[0] > 0 and (kept[1] > 0 or family != "qwen3_moe")


@pytest.mark.parametrize("width", [1, 2])
def test_after_rejections_the_draft_knows_what_it_would_know_from_nothing(mtp_checkpoint, width):
    """Its keys and values are those of the true hidden states, whatever was drafted, rejected, left alone and retracted in between."""
    engine = make_engine(mtp_checkpoint(), 3, max_running_requests=4)
    if width > 1:
        engine.decoder = TreeDecoder(engine.decoder.draft, Lookahead(3), width)
    engine.decoder.lookahead.plain = 3
    read, checked = engine.decoder._read, []

    def checked_read(engine, rows):
        got = read(engine, rows)
        for row, out in zip(rows, got, strict=True):
            found = []

            def again(prompts, found=found):
                before = torch.cat([torch.zeros_like(prompts.hidden[:1]), prompts.hidden[:-1]])
                found.append(engine.decoder.draft(prompts.tokens, before, prompts.positions, prompts.call)[-1])

            EmbeddedEngine(engine.model, Settings(str)).runner.prefixes([row.tokens], set(), again)
            torch.testing.assert_close(out, found[0], atol=1e-4, rtol=1e-3)
            checked.append(row)
        return got

    engine.decoder._read = checked_read

    async def main():
        requests = [Request([5, 9, 3], Sampling(14), key=i) for i in range(6)]
        tasks = [asyncio.ensure_future(engine.generate(r)) for r in requests]
        while len(checked) < 8:
            await asyncio.sleep(0)
        await engine.pause("retract")
        await engine.resume()
        return await asyncio.gather(*tasks)

    responses = asyncio.run(main())
    kept = sum(r.metrics["kept_1"] for r in responses)
    assert len(checked) > 20 and 0 < kept < sum(r.metrics["tried_1"] for r in responses)


class Off(Lookahead):
    """Drafts in few steps, and at first in none."""

    steps = 0

    @property
    def idle(self):
        return self.steps < 2

    def choose(self, rows):
        self.steps += 1
        return self.k if self.steps % 5 == 0 else 0


def test_a_draft_that_was_left_alone_drafts_on(mtp_checkpoint, monkeypatch):
    """Prompts it did not read and tokens it forgot cost acceptance, not text; nothing is computed by it, or kept for it, meanwhile."""
    checkpoint = mtp_checkpoint()
    monkeypatch.setattr(decoder, "UNREAD", 3)
    requests = [Request([5, 9, 3 + i % 2], Sampling(14, temperature=0.0, ignore_eos=True), key=i) for i in range(6)]
    plain = generate(make_engine(checkpoint), requests)
    engine = make_engine(checkpoint, 3, max_running_requests=4)
    engine.decoder.lookahead, read = Off(3), []
    draft = engine.decoder.draft

    class Counted:
        logits = draft.logits

        def __call__(self, *given):
            read.append(engine.decoder.lookahead.steps)
            return draft(*given)

    engine.decoder.draft = Counted()
    drafted = generate(engine, requests)
    assert [r.tokens for r in drafted] == [p.tokens for p in plain]
    assert read and all(steps and (steps % 5 == 0 or steps > 5) for steps in read)
    assert min(read) == 5 and len(engine.decoder._passed) <= 3
    counts = engine.decoder.lookahead.acceptance.reached
    assert 0 < counts[0] < sum(r.metrics["tried_1"] for r in drafted)  # the first rows' drafts say nothing of the draft
    assert not engine.decoder._blind


def test_a_draft_that_is_always_right_is_always_kept(mtp_checkpoint):
    """The head replaced by one that knows: every step emits all drafts and one token more, and the cache stays right."""
    checkpoint = mtp_checkpoint()
    request = Request([3, 7, 4], Sampling(20, temperature=0.0, ignore_eos=True))
    (plain,) = generate(make_engine(checkpoint), [request])
    engine = make_engine(checkpoint, 4)
    answer = [*request.tokens, *plain.tokens, *[0] * 9]

    class Knows:
        def __call__(self, tokens, hidden, positions, call):
            return positions.unsqueeze(1).float()

        def logits(self, out):
            following = torch.tensor(answer)[out[:, 0].long() + 1]
            return torch.nn.functional.one_hot(following, 64).float() * 50

    engine.decoder.draft = Knows()
    (drafted,) = generate(engine, [request])
    assert drafted.tokens == plain.tokens
    assert drafted.metrics["draft_steps"] == 4  # one token from the prompt, then 5, 5, 5 and 4
    assert drafted.metrics["drafted"] == sum(drafted.metrics[f"kept_{d}"] for d in range(1, 5)) == 4 + 4 + 4 + 3
