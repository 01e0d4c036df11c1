"""A decoder: what one scheduler step does with the running rows.

Core's decoder feeds each row its last token and samples one. A drafting decoder feeds several, keeps those the model
agrees with, drops the rest from the cache and emits them all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from miles_embedded.engine.sampling import Sampled

if TYPE_CHECKING:
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.scheduler import Row


@dataclass
class Emitted:
    """What a step decided for each row, at least one token each.

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


class Decoder(Protocol):
    """One step over the running rows.

    When it returns, each row's cache must hold its tokens up to and without the last emitted one: feed through
    ``engine.forward``, which appends to the cache, and drop what is not kept with ``engine.truncate``. Rows come and
    go between steps; whatever a decoder remembers belongs in a mapping keyed by row and is dropped in ``leave``.
    """

    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        """Advance every row; ``row.tokens`` is prompt and response so far, its last token not yet cached."""

    def leave(self, rows: Sequence[Row]) -> None:
        """These rows are finished or were evicted from the cache."""


class PlainDecoder:
    """One token a row and step."""

    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        logits = engine.forward(rows, [row.tokens[-1:] for row in rows]).logits
        return one_each(engine.sample(logits, rows))

    def leave(self, rows: Sequence[Row]) -> None:
        """Nothing is remembered."""


def one_each(sampled: Sampled) -> Emitted:
    """``Sampled`` of one logits row a row, as Emitted."""
    supports = None if sampled.supports is None else [[s] for s in sampled.supports]
    capped = None if sampled.capped is None else [[c] for c in sampled.capped]
    return Emitted([[t] for t in sampled.tokens], [[p] for p in sampled.log_probs], supports, capped)


def make_decoder() -> PlainDecoder:
    """The provider of the decoder named ``plain``."""
    return PlainDecoder()
