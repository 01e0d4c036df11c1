"""A decoder: what one scheduler step does with the running rows.

Core's decoder feeds each row its last token and samples one. A drafting decoder feeds several, keeps those the model
agrees with, drops the rest from the cache and emits them all at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from miles_embedded.engine.prompts import Prompts
from miles_embedded.engine.sampling import Sampled

if TYPE_CHECKING:
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.scheduler import Row


@dataclass
class Emitted:
    """What a step decided for each row: at least one token, or none for a row that joined while a step was under way.

    Attributes:
        tokens: new tokens, in order.
        log_probs: of those tokens, under the distribution the model (not a draft) samples from.
        supports: their sampling supports where rows are truncated (see ``sampling.Sampled``), else None.
        capped: likewise, whether the cap cut them.
    """

    tokens: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]
    supports: Sequence[Sequence[np.ndarray]] | None = None
    capped: Sequence[Sequence[bool]] | None = None


class Decoder(ABC):
    """One step over the running rows.

    When ``step`` returns, each row's cache must hold its tokens up to and without the last emitted one: feed through
    ``engine.forward``, which appends to the cache, and drop what is not kept with ``engine.truncate`` or ``engine.keep``.
    Rows come and go between steps; whatever a decoder remembers belongs in a mapping keyed by row and is dropped in ``leave``.
    """

    @abstractmethod
    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        """Advance every row; ``row.tokens`` is prompt and response so far, its last token not yet cached. Numbers put
        into ``row.metrics`` come back with the response."""

    def prompts(self, engine: EmbeddedEngine, prompts: Prompts) -> None:
        """Prompts were computed, each once for all rows that will continue it; ``join`` follows."""

    def join(self, engine: EmbeddedEngine, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        """These rows now run; ``hidden[i]`` [hidden] is that of the last token which the cache holds of row i."""

    def leave(self, rows: Sequence[Row]) -> None:
        """These rows are finished or were evicted from the cache."""


class PlainDecoder(Decoder):
    """One token a row and step, on a GPU by steps that are launched ahead of the host (``ahead``)."""

    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        emitted = engine.ahead.step(rows)
        if emitted is not None:
            return emitted
        logits = engine.forward(rows, [row.tokens[-1:] for row in rows]).logits
        return one_each(engine.sample(logits, rows))


def one_each(sampled: Sampled) -> Emitted:
    """``Sampled`` of one logits row a row, as Emitted."""
    supports = None if sampled.supports is None else [[s] for s in sampled.supports]
    capped = None if sampled.capped is None else [[c] for c in sampled.capped]
    return Emitted([[t] for t in sampled.tokens], [[p] for p in sampled.log_probs], supports, capped)


def make_decoder() -> PlainDecoder:
    """The provider of the decoder named ``plain``."""
    return PlainDecoder()
