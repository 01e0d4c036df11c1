"""The embedded engine against Transformers' own generation and forward."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers

from miles_core.embedded.engine import EmbeddedEngine, Settings
from miles_core.embedded.model import load_model
from miles_core.rollout.engine import Request, Sampling
from miles_core.testing.tiny import FAMILIES, tiny_checkpoint

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


def letters(tokens):
    return "".join(chr(48 + t) for t in tokens)


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def generate(engine, requests):
    async def main():
        return await asyncio.gather(*[engine.generate(r) for r in requests])

    return asyncio.run(main())


def test_greedy_equals_transformers_generate(checkpoint):
    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters, eos=[1]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    got = generate(engine, [Request(p, Sampling(12, temperature=0.0)) for p in PROMPTS])
    for prompt, response in zip(PROMPTS, got, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        assert response.tokens == expected[0, len(prompt) :].tolist()


def test_log_probs_equal_a_full_forward(checkpoint):
    engine = EmbeddedEngine(load_model(checkpoint), Settings(letters, eos=[1]))
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    requests = [
        Request(p, Sampling(4 + k, temperature=0.9), key=10 * i + k) for i, p in enumerate(PROMPTS) for k in range(4)
    ]
    for request, response in zip(requests, generate(engine, requests), strict=True):
        tokens = torch.tensor([request.tokens + response.tokens])
        with torch.no_grad():
            logp = (reference(tokens).logits[0].float() / 0.9).log_softmax(-1)
        expected = logp[:-1].gather(1, tokens[0, 1:, None])[len(request.tokens) - 1 :, 0]
        np.testing.assert_allclose(response.log_probs, expected.numpy(), atol=2e-5)
