"""The result of a decoder's step, and the engine's interface for decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from miles_embedded.engine import sampling as draw
from miles_embedded.engine.attention import DecodeCall
from miles_embedded.engine.columns import RowColumns
from miles_embedded.engine.row import Row
from miles_embedded.engine.runner import ForwardResult, Runner
from miles_embedded.engine.settings import Settings


@dataclass
class Emitted:
    """Result of a step: at least one token for each row, or none for a row that joined while the step was in flight.

    Attributes:
        tokens: new tokens of each row, in order.
        log_probs: their log-probabilities under the distribution the model (not a draft) samples from.
        supports: their sampling supports if rows are truncated (see ``sampling.Sampled``), otherwise None.
        capped: whether the cap reduced each support, otherwise None.
    """

    tokens: Sequence[Sequence[int] | np.ndarray]
    log_probs: Sequence[Sequence[float] | np.ndarray]
    supports: Sequence[Sequence[np.ndarray]] | None = None
    capped: Sequence[Sequence[bool]] | None = None

    @classmethod
    def of(cls, sampled: draw.Sampled) -> Emitted:
        """Convert one token per row."""
        columns = (sampled.tokens, sampled.log_probs, sampled.supports, sampled.capped)
        return cls(*(None if column is None else [[entry] for entry in column] for column in columns))  # type: ignore[arg-type]


class StaticSteps(Protocol):
    """Steps in static buffers, see ``AsyncScheduling``.

    Attributes:
        used: whether they are enabled.
    """

    used: bool

    def step(self, rows: list[Row]) -> Emitted | draw.Sampled | None:
        """Advance all running rows; None when the step has to run without static buffers."""


class StepEngine(Protocol):
    """The engine, as a decoder sees it.

    Attributes:
        model: the model, which ``runner`` runs over cached rows.
        max_context: largest sequence length.
        async_steps: steps in static buffers, which a decoder with steps of its own may replace.
        columns: lengths, last tokens and others of all running rows, one entry per slot.
    """

    model: nn.Module
    settings: Settings
    runner: Runner
    max_context: int
    async_steps: StaticSteps
    columns: RowColumns

    def weight_tensors(self) -> Iterable[Tensor]:
        """Return the tensors whose addresses recorded steps contain."""

    def recorded_fields(self) -> set[str]:
        """Return the names of the fields that running rows request."""

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], parents: np.ndarray | None = None
    ) -> ForwardResult:
        """Feed ``tokens[i]`` (at least one) to row i; returns logits and hidden states of all fed tokens, flattened in row order.
        With ``parents`` [rows, tokens] the tokens form a tree, see ``CachedRows``."""

    def call(
        self, rows: Sequence[Row], counts: Sequence[int], lengths: Sequence[int], parents: np.ndarray | None = None
    ) -> DecodeCall:
        """Make a call for layers outside the model's own forward. Row i feeds ``counts[i]`` tokens after the first ``lengths[i]`` of
        its sequence, or with ``parents`` the last nodes of a tree at that place. Keys and values go to the cache of the same rows
        and overwrite entries after ``lengths[i]``; the lengths of the rows do not change."""

    def truncate(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Drop the cached tokens of row i after ``lengths[i]`` tokens, prompt included; cannot cut into the prompt."""

    def keep(self, rows: Sequence[Row], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the tokens ``paths[i]`` (ascending) among those fed after the first ``lengths[i]`` tokens of row i; drop the others."""

    def sample(
        self, logits: Tensor, rows: Sequence[Row], positions: Tensor | None = None, stream: int = 0
    ) -> draw.Sampled:
        """Sample one token from each logits row [n, vocab] with the parameters and key of ``rows[i]``. ``positions`` [n] are the
        indices of the sampled tokens in their sequences, by default the next index of each row."""

    def distribution(self, logits: Tensor, rows: Sequence[Row], counts: Tensor | None = None) -> draw.Distribution:
        """Return the distribution that ``sample`` uses, [n, vocab]. ``counts`` [rows]: number of logits rows that belong to each of
        ``rows``, by default one."""

    def record(
        self, dist: draw.Distribution, rows: Sequence[Row], tokens: Tensor, counts: Tensor | None = None
    ) -> draw.Sampled:
        """Return log-probabilities and supports of tokens [n] that a decoder chose from ``distribution(logits, rows, counts)``."""

    def uniform(self, rows: Sequence[Row], positions: Tensor | None = None, stream: int = 1) -> Tensor:
        """Return float64 numbers in (0, 1) for ``positions`` [rows] or [rows, n]; ``sample`` uses ``stream`` 0."""
