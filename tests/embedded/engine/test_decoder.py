"""A decoder that drafts: several tokens a row and step, the same distribution, the same greedy text."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from miles_core.contracts.engine import Request, Sampling
from miles_embedded.engine.decoder import Decoder
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.sampling import pick
from miles_embedded.engine.settings import Settings
from miles_embedded.engine.step import Emitted
from miles_embedded.model.load import load_model
from miles_testing.tiny import tiny_checkpoint


class DraftingDecoder(Decoder):
    """Drafts with ``propose(row) -> tokens`` (a point mass each) and verifies all drafts of all rows in one forward.

    Acceptance sampling (Leviathan et al. 2023, arXiv 2211.17192): draft x is kept with probability p(x); the first that is not
    is replaced by a draw from p without x; when all are kept, one more is drawn from p.
    """

    def __init__(self, propose):
        self.propose, self.steps, self.drafted, self.accepted = propose, 0, 0, 0

    def step(self, engine, rows):
        drafts = [list(self.propose(row))[: row.limit - len(row.tokens) - 1] for row in rows]
        fed = engine.forward(rows, [[row.tokens[-1], *d] for row, d in zip(rows, drafts, strict=True)])
        owners = [row for row, d in zip(rows, drafts, strict=True) for _ in range(len(d) + 1)]
        positions = torch.tensor(
            [len(row.tokens) + i for row, d in zip(rows, drafts, strict=True) for i in range(len(d) + 1)]
        )
        dist = engine.distribution(fed.logits, owners)
        probs = dist.log_probs.exp()
        keep, redraw = engine.uniform(owners, positions, 1), engine.uniform(owners, positions, 0)
        tokens, log_probs, at = [], [], 0
        for draft in drafts:
            new = []
            for i, x in enumerate([*draft, None]):
                p = probs[at + i]
                if x is not None and keep[at + i] < p[x]:
                    new.append(x)
                    continue
                rest = p.clone()
                if x is not None:
                    rest[x] = 0
                new.append(pick(rest[None], redraw[at + i : at + i + 1]).item())
                break
            tokens.append(new)
            log_probs.append([dist.full[at + i, t].item() for i, t in enumerate(new)])
            at += len(draft) + 1
            self.drafted += len(draft)
            self.accepted += len(new) - 1
        engine.truncate(rows, [len(row.tokens) + len(new) - 1 for row, new in zip(rows, tokens, strict=True)])
        self.steps += 1
        return Emitted(tokens, log_probs)


def ngram(row, longest=4):
    """What followed the last earlier occurrence of the last token."""
    for i in range(len(row.tokens) - 2, -1, -1):
        if row.tokens[i] == row.tokens[-1]:
            return row.tokens[i + 1 : i + 1 + longest]
    return []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model")))


def run(model, requests, decoder=None, **settings):
    made = Settings(lambda tokens: "".join(chr(48 + t) for t in tokens), eos=[1], **settings)
    engine = EmbeddedEngine(model, made, decoder)

    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def test_greedy_text_is_the_same_with_and_without_drafts(model):
    greedy = Sampling(24, temperature=0.0)
    requests = [Request([3 + i, 7, 3 + i, 7], greedy, key=i) for i in range(5)]
    plain = run(model, requests)
    answers = {tuple(r.tokens): p.tokens for r, p in zip(requests, plain, strict=True)}

    def oracle(row):  # right twice, then wrong
        rest = answers[tuple(row.request.tokens)][len(row.response) :]
        return [*rest[:2], (rest[2] + 1) % 64] if len(rest) > 2 else rest

    for propose in (ngram, oracle):
        decoder = DraftingDecoder(propose)
        drafted = run(model, requests, decoder)
        assert [r.tokens for r in drafted] == [p.tokens for p in plain]
    assert decoder.accepted > 0 and decoder.steps < 23  # several tokens a step


def test_drafting_keeps_the_distribution(model):
    count, sampling = 3000, Sampling(3, temperature=1.3, ignore_eos=True)
    requests = [Request([5, 9, 5], sampling, key=i) for i in range(count)]
    plain = run(model, requests, max_running_requests=count)
    decoder = DraftingDecoder(lambda row: [9, 5])
    drafted = run(model, requests, decoder, max_running_requests=count)
    assert decoder.drafted > 0
    for position in range(3):
        a = Counter(r.tokens[position] for r in plain)
        b = Counter(r.tokens[position] for r in drafted)
        both = [(a[t], b[t]) for t in range(64) if a[t] + b[t] > 20]
        chi2 = sum((x - y) ** 2 / (x + y) for x, y in both)
        assert chi2 < len(both) + 4 * (2 * len(both)) ** 0.5, (position, chi2, len(both))


def test_log_probs_and_stops_of_drafted_tokens(model):
    requests = [Request([5, 9, 5], Sampling(20, stop_token_ids=(7, 8, 9, 10)), key=i) for i in range(8)]
    got = run(model, requests, DraftingDecoder(ngram))
    engine = EmbeddedEngine(model, Settings(str, eos=[1]))
    for request, response in zip(requests, got, strict=True):
        stops = [t for t in response.tokens if t in (1, 7, 8, 9, 10)]
        assert (response.finish == "stop") == bool(stops) and stops == response.tokens[-1:][: len(stops)]
        scored = asyncio.run(engine.score([request.tokens + response.tokens]))[0]
        np.testing.assert_allclose(response.log_probs, scored[len(request.tokens) - 1 :], atol=1e-4)


def test_a_failing_decoder_fails_every_request_and_leaves_the_engine_usable(model):
    class Broken(DraftingDecoder):
        def step(self, engine, rows):
            raise ZeroDivisionError("no draft")

    engine = EmbeddedEngine(model, Settings(str, eos=[1], max_running_requests=2), Broken(ngram))

    async def main():
        requests = [Request([5, 9], Sampling(5), key=i) for i in range(5)]
        failed = await asyncio.gather(*[engine.generate(r) for r in requests], return_exceptions=True)
        engine.decoder = DraftingDecoder(ngram)
        return failed, await engine.generate(requests[0])

    failed, worked = asyncio.run(main())
    assert all(isinstance(f, ZeroDivisionError) for f in failed) and len(worked.tokens) > 0
