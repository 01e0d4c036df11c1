"""The engine with drafts: the same greedy text, the same distribution, log-probs of the model itself."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from miles_core.backend import Request, Sampling
from miles_embedded import load_model
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import attach
from miles_speculative.lookahead import Lookahead


def make_engine(checkpoint, k=0, **settings):
    """An engine of the checkpoint; with ``k`` it drafts so many tokens with the checkpoint's MTP layer."""
    model = load_model(checkpoint)
    made = Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1], **settings)
    if k:
        made.decoder = SpeculativeDecoder(attach(model, checkpoint), Lookahead(k))
    return EmbeddedEngine(model, made)


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
