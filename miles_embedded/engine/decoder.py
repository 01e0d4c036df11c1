"""The decoder interface: one scheduler step over the running rows.

``PlainDecoder`` feeds the last token of each row and samples the next. A drafting decoder feeds several tokens, keeps those that
the model accepts, removes the others from the cache and emits all accepted tokens at once.
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
    """Result of a step: at least one token for each row, or none for a row that joined while the step was in flight.

    Attributes:
        tokens: new tokens of each row, in order.
        log_probs: their log-probabilities under the distribution the model (not a draft) samples from.
        supports: their sampling supports if rows are truncated (see ``sampling.Sampled``), otherwise None.
        capped: whether the cap reduced each support, otherwise None.
    """

    tokens: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]
    supports: Sequence[Sequence[np.ndarray]] | None = None
    capped: Sequence[Sequence[bool]] | None = None


class Decoder(ABC):
    """One step over the running rows.

    After ``step`` the cache of each row must contain its tokens except the last emitted one. Feed tokens with ``engine.forward``,
    which appends them to the cache, and drop rejected ones with ``engine.truncate`` or ``engine.keep``. Rows join and leave between
    steps: store state of a decoder in a mapping keyed by row, and delete it in ``leave``.
    """

    @abstractmethod
    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        """Advance every row. ``row.tokens`` is prompt and response so far; its last token is not cached yet. Numbers stored in
        ``row.metrics`` are returned with the response."""

    def prompts(self, engine: EmbeddedEngine, prompts: Prompts) -> None:
        """Handle newly computed prompts, each computed once for all rows that will continue it; ``join`` follows."""

    def join(self, engine: EmbeddedEngine, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        """Handle rows that start running; ``hidden[i]`` [hidden] is the hidden state of the last cached token of row i."""

    def leave(self, rows: Sequence[Row]) -> None:
        """Handle rows that finished or were evicted from the cache."""


class PlainDecoder(Decoder):
    """Sample one token per row and step; on a GPU with steps launched ahead of the host (``ahead``)."""

    def step(self, engine: EmbeddedEngine, rows: list[Row]) -> Emitted:
        emitted = engine.ahead.step(rows)
        if emitted is not None:
            return emitted
        logits = engine.forward(rows, [row.tokens[-1:] for row in rows]).logits
        return to_emitted(engine.sample(logits, rows))


def to_emitted(sampled: Sampled) -> Emitted:
    """Convert a ``Sampled`` with one token per row to an ``Emitted``."""
    supports = None if sampled.supports is None else [[s] for s in sampled.supports]
    capped = None if sampled.capped is None else [[c] for c in sampled.capped]
    return Emitted([[t] for t in sampled.tokens], [[p] for p in sampled.log_probs], supports, capped)


def make_decoder() -> PlainDecoder:
    """Make the decoder named ``plain``."""
    return PlainDecoder()
