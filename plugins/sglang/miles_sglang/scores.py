"""Scores of given sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.plugin import MilesError
from miles_sglang.answers import Answer
from miles_sglang.link import ServerLeft
from miles_sglang.responses import Translator
from miles_workers import Renewal

#: Sends the body of ``generate``, and returns server -> answer.
Ask = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Answer]]]


class Scorer:
    """Scores sequences with requests that generate nothing.

    Args:
        translator: makes the requests.
        renewal: repeats requests after a restart of SGLang.
        numbers: numbers the engine's requests.
    """

    def __init__(self, translator: Translator, renewal: Renewal, numbers: Iterator[int]) -> None:
        self._translator, self._renewal, self._numbers = translator, renewal, numbers

    async def score(
        self, ask: Ask, sequences: Sequence[Sequence[int]], temperature: float, media: Sequence[Any]
    ) -> dict[str, list[np.ndarray]]:
        """Return the scores by server, without servers that left before they had scored all sequences."""
        if temperature != 1.0:
            raise MilesError(f"SGLang can score only at temperature 1, not {temperature:g}")
        limit = self._translator.max_context
        for i, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                raise MilesError(f"sequence {i} to score has {len(sequence)} tokens; 1 to {limit} are possible")
        shown = media or [()] * len(sequences)
        each = await asyncio.gather(*(self._score_one(ask, *pair) for pair in zip(sequences, shown, strict=True)))
        names = [name for name in each[0] if all(name in found for found in each)] if each else [""]
        return {name: [found[name] for found in each] for name in names}

    async def _score_one(self, ask: Ask, sequence: Sequence[int], media: tuple[Any, ...]) -> Mapping[str, np.ndarray]:
        body = self._translator.score_body(sequence, media, f"{next(self._numbers):016x}")
        none = np.zeros(0, np.float32)  # of a single token
        while True:
            try:
                answers = await self._renewal.retry(lambda: ask(body))
            except ServerLeft:
                continue
            return {name: np.array(found.columns.get("prompt_log_probs", none)) for name, found in answers.items()}
