"""What a model learns before its drafts are measured: a synthetic language, or what a model writes itself."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from miles_core.engine import Request, Sampling
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings

#: Tokens of the synthetic language, at most.
WORDS = 256


class Language:
    """Sequences that a model can learn in a minute: most tokens follow from the two before them, some are free, and of a large vocabulary the
    first ones are used."""

    def __init__(self, vocab: int, seed: int, free: float = 0.15) -> None:
        vocab = min(vocab, WORDS)
        self.vocab, self.free = vocab, free
        self.generator = torch.Generator().manual_seed(seed)
        self.follows = torch.randint(2, vocab, (vocab, 4), generator=self.generator)

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length] ids."""
        out = torch.randint(2, self.vocab, (count, length), generator=self.generator)
        chance = torch.rand(count, length, generator=self.generator)
        for t in range(2, length):
            known = self.follows[out[:, t - 1], out[:, t - 2] % 4]
            out[:, t] = torch.where(chance[:, t] < self.free, out[:, t], known)
        return out


class Rollouts:
    """What the policy itself generates, as a language to train a draft on: ``count`` responses, of which each batch has some."""

    def __init__(self, model: Any, language: Any, count: int = 64, length: int = 96) -> None:
        engine = EmbeddedEngine(model, Settings(lambda tokens: "", eos=[1], max_running_requests=count))
        prompts = [list(map(int, prompt)) for prompt in language.batch(count, 16)]
        requests = [Request(p, Sampling(length - 16, ignore_eos=True), key=i) for i, p in enumerate(prompts)]

        async def run() -> list[Any]:
            return await asyncio.gather(*map(engine.generate, requests))

        self.rows = [p + r.tokens for p, r in zip(prompts, asyncio.run(run()), strict=True)]
        self.given = 0

    def batch(self, count: int, length: int) -> list[list[int]]:
        """``count`` sequences; ``length`` is not looked at."""
        self.given += count
        return [self.rows[i % len(self.rows)] for i in range(self.given - count, self.given)]
