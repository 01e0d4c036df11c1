"""Checks at the start of a run that engine and trainer compute the same bits, for one request and for several at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from miles_core.data import Sample
from miles_core.engine import Request, Sampling
from miles_core.plugin import MismatchError

log = logging.getLogger(__name__)

#: Number of requests that are generated at once, tokens of the longest prompt, and of each response.
ROWS, PROMPT, RESPONSE = 7, 150, 24
#: Distance of the first request's key from those of samples.
_FIRST_KEY = 1 << 44


def make_check(run: Any) -> Callable[[Any], Awaitable[Mapping[str, float]]] | None:
    """Create the check; None with ``--no-self-check``."""
    return StartCheck(run) if run.config.model.self_check else None


class StartCheck:
    """Compares each policy's engine and trainer once, after its first weight sync."""

    def __init__(self, run: Any) -> None:
        self._run, self._done = run, set[str]()

    async def __call__(self, parts: Any) -> dict[str, float]:
        """Compare the log-probabilities of generated tokens.

        Raises:
            MismatchError: one of them differs.
        """
        if parts.engine is None or parts.policy.name in self._done:
            return {}
        self._done.add(parts.policy.name)
        first = await self._generate(parts, [0])
        generated = [*first, *await self._generate(parts, range(1, ROWS + 1))]
        scored = await parts.learner.log_probs([sample for sample, _ in generated])
        gaps = np.concatenate([np.abs(found - row) for (_, found), row in zip(generated, scored, strict=True)])
        if not gaps.any():
            log.info("engine and trainer compute the same bits: the gap is 0.0 for %d tokens", gaps.size)
            return {}
        message = (
            f"--true-on-policy-mode: the log-probabilities of {int((gaps > 0).sum())} of {gaps.size} generated tokens differ between engine "
            f"{self._run.config.run.engine} and trainer {self._run.config.run.trainer} (largest difference {gaps.max():.2g}); miles verify "
            "--exact names the first layer whose outputs differ, with --engine embedded; leave the flag out to train with the difference"
        )
        if not self._run.config.run.allow_mismatch:
            raise MismatchError(message)
        log.warning("%s (--allow-mismatch was given)", message)
        return {}

    async def _generate(self, parts: Any, rows: Any) -> list[tuple[Sample, np.ndarray]]:
        """Generate a response to a prompt of random tokens for each row, all at once; the samples and the engine's log-probabilities.

        Samples carry nothing that the engine recorded, so the trainer computes everything itself, its routes included."""
        config = self._run.config
        vocabulary = int(self._run.plan.fact("model.vocab_size") or len(self._run.tokenizer))
        context = int(config.rollout.max_context_len or self._run.plan.fact("model.context") or PROMPT + RESPONSE)
        tokens = max(min(RESPONSE, context // 2), 1)
        longest = max(min(PROMPT, context - tokens), 1)
        sampling = Sampling(tokens, temperature=config.rollout.temperature, ignore_eos=True)

        async def ask(row: int) -> tuple[Sample, np.ndarray]:
            length = 1 + row * (longest - 1) // ROWS
            prompt = np.random.default_rng(row).integers(0, vocabulary, length).tolist()
            response = await parts.serving.generate(
                Request(prompt, sampling, key=_FIRST_KEY + row, group=row, policy=parts.policy.name)
            )
            sample = Sample(tokens=[*prompt, *response.tokens], index=row, group_index=row)
            sample.response_length = len(response.tokens)
            return sample, np.asarray(response.log_probs, np.float32)

        return list(await asyncio.gather(*map(ask, rows)))
