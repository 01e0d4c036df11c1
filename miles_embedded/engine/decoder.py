"""The decoder interface: one scheduler step over the running rows.

``PlainDecoder`` feeds the last token of each row and samples the next. A drafting decoder feeds several tokens, keeps those that
the model accepts, removes the others from the cache and emits all accepted tokens at once.

``AsyncSteps`` launches steps in static buffers, on a GPU as CUDA graphs, one ahead of the host (``AsyncScheduling``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from miles_embedded.engine import sampling as draw
from miles_embedded.engine.async_scheduling import AsyncScheduling, Launched, fill_rows
from miles_embedded.engine.attention import Prompts
from miles_embedded.engine.row import Row, slots_of
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.static_step import Shape, StaticStep, padded_rows
from miles_embedded.engine.step import Emitted, StepEngine


class Decoder(ABC):
    """One step over the running rows.

    After ``step`` the cache of each row must contain its tokens except the last emitted one. Feed tokens with ``engine.forward``,
    which appends them to the cache, and drop rejected ones with ``engine.truncate`` or ``engine.keep``. Rows join and leave between
    steps: store state of a decoder in a mapping keyed by row, and delete it in ``leave``.
    """

    @abstractmethod
    def step(self, engine: StepEngine, rows: list[Row]) -> Emitted | Sampled:
        """Advance every row, by one token (``Sampled``) or several (``Emitted``).

        ``row.tokens`` is prompt and response so far; its last token is not cached yet. Numbers stored in ``row.metrics`` are returned
        with the response.
        """

    def prompts(self, engine: StepEngine, prompts: Prompts) -> None:
        """Handle newly computed prompts, each computed once for all rows that will continue it; ``join`` follows."""

    @property
    def reads_prompts(self) -> bool:
        """Whether this decoder defines ``prompts``."""
        return type(self).prompts is not Decoder.prompts

    def join(self, engine: StepEngine, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        """Handle rows that start running; ``hidden[i]`` [hidden] is the hidden state of the last cached token of row i."""

    def leave(self, rows: Sequence[Row]) -> None:
        """Handle rows that finished or were evicted from the cache."""


class PlainDecoder(Decoder):
    """Sample one token per row and step; on a GPU with steps launched ahead of the host (``AsyncSteps``)."""

    def step(self, engine: StepEngine, rows: list[Row]) -> Emitted | Sampled:
        # static steps advance all rows, but those of a paused variant wait
        emitted = engine.async_steps.step(rows) if len(rows) == engine.columns.count else None
        if emitted is not None:
            return emitted
        logits = engine.forward(rows, last_tokens(engine, rows)).logits
        return engine.sample(logits, rows)


def last_tokens(engine: StepEngine, rows: Sequence[Row]) -> list[list[int]]:
    """Return the last token of each of the rows."""
    return [[token] for token in engine.columns.last[slots_of(rows)].tolist()]


class AsyncSteps(AsyncScheduling[Shape]):
    """Static steps for decoders that sample one token per row and step."""

    def __init__(self, engine: StepEngine, used: bool) -> None:
        size = padded_rows(engine.settings.max_running_requests)
        batch = StaticBatch(size, engine.runner.device)
        super().__init__(engine, used, batch, StaticStep(engine.runner, batch, engine.settings.seed))

    def step(self, rows: list[Row]) -> Sampled | None:
        """Advance all running rows by one token; None when the step has to run without static buffers."""
        pending, self._pending = self._pending, None
        if pending is None or not pending.occupied:
            if not self.used or not self._make_ready(rows, first := self._shape(rows)):
                return None
            if not first.draws:
                return self._from_logits(rows, first)
            pending = self._launch(rows, first)
        # rows that joined since that launch are filled from the host
        if pending.covers(len(rows)) and (shape := self._next(pending, rows)) is not None:
            self._pending = self._launch(rows, shape)
        return self._read(pending, rows)

    def _shape(self, rows: Sequence[Row]) -> Shape:
        samplings = [row.request.sampling for row in rows]
        draws = not any(s.truncated and s.temperature > 0 for s in samplings)
        mixed = draws and any(s.temperature == 0 for s in samplings)
        return Shape(padded_rows(len(rows)), draws, mixed, frozenset(self.engine.recorded_fields()))

    def _fill(self, rows: list[Row]) -> None:
        fill_rows(self.batch, self.engine, rows)

    def _next(self, launched: Launched[Shape], rows: list[Row]) -> Shape | None:
        """The shape of the next step of ``rows``, the remaining rows of ``launched``. None where it must wait for the tokens of this step: a
        row would exceed the model's context or the cache's capacity, no row continues, or the step is not recorded."""
        lengths = self.engine.columns.lengths[: len(rows)] + 1
        count, shape = padded_rows(len(rows)), launched.shape
        if shape.rows != count:
            shape = replace(shape, rows=count)
        possible = (
            int(lengths.max()) < self.engine.max_context
            and bool((lengths < self.engine.columns.limits[: len(rows)]).any())
            and self._has_room(rows, shape)
        )
        if possible and not self.graphs.ready(shape) and launched.shape.rows <= 2 * shape.rows:
            shape = launched.shape  # of a few rows more
        return shape if possible and self.graphs.ready(shape) else None

    def _read(self, launched: Launched[Shape], rows: Sequence[Row]) -> Sampled:
        """Wait for the step and return its tokens for ``rows``; -1 for rows that joined after the launch."""
        results = launched.wait().numpy()
        draw.check_finite(results[0], results[1], self.runner.vocabulary)
        places = launched.find(len(rows))
        tokens, log_probs = results[:, places]
        tokens = tokens.astype(np.int64)
        tokens[places < 0] = -1
        return Sampled(tokens, log_probs)

    def _from_logits(self, rows: list[Row], shape: Shape) -> Sampled:
        """Run a step that returns logits and sample on the host, which truncated distributions (top-k, top-p) require."""
        logits = self.graphs.run(shape)[: len(rows)]
        self.runner.cache.own.lengths[: len(rows)] += 1
        return self.engine.sample(logits, rows)

    def _compare(self, rows: list[Row], shape: Shape) -> None:
        shape = Shape(padded_rows(len(rows)), draws=False)
        self._fill(rows)
        self.graphs.prepare(shape)
        static = self.graphs.run(shape)[: len(rows)]
        plain = self.engine.forward(rows, last_tokens(self.engine, rows)).logits
        self.runner.cache.own.lengths[: len(rows)] -= 1
        self._check_gap(static, plain)
