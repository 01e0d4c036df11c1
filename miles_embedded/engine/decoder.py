"""The decoder interface: one scheduler step over the running rows.

``PlainDecoder`` feeds the last token of each row and samples the next. A drafting decoder feeds several tokens, keeps those that
the model accepts, removes the others from the cache and emits all accepted tokens at once.

``StepsAhead`` launches the next step before the host reads the tokens of the current one. A step writes its sampled tokens to device
buffers that the next step reads. The GPU therefore keeps working while the host appends tokens, checks stop conditions and answers
requests. When rows leave, the others continue in their new slots. When rows join, the step in flight still counts for the rows that were
there; the step after it is filled from the host again.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from miles_core.errors import NonFiniteError, first_line
from miles_embedded.engine import sampling as draw
from miles_embedded.engine.graphs import Graphs
from miles_embedded.engine.prompts import Prompts
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.static_attention import CannotBeStatic
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.engine.static_step import Shape, StaticStep, padded_rows

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
    """Sample one token per row and step; on a GPU with steps launched ahead of the host (``StepsAhead``)."""

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


log = logging.getLogger(__name__)

#: New tokens per row to reserve cache room for at once. Rarer growth means fewer recordings of the graphs.
_ROOM = 512
#: Largest mean |difference| between the log-probabilities of a static and a plain step that rounding explains, in nats.
TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
TOLERANCE_LOW = 0.3


@dataclass
class _Launched:
    """A step in flight.

    Attributes:
        rows: rows of the batch, in slot order.
        shape: which variant of the step runs.
        results: host buffer for tokens and log-probabilities; valid once ``event`` has passed.
        event: end of the copy to the host; None without a GPU.
        waiting: rows that still need the result, with their index in the batch.
    """

    rows: list[Row]
    shape: Shape
    results: Tensor
    event: torch.cuda.Event | None
    waiting: dict[Row, int]


class StepsAhead:
    """Static steps of ``engine``'s model, for decoders that sample one token per row and step.

    Attributes:
        used: whether static steps are enabled; otherwise every step is a plain forward.
        refused: why they were disabled after the engine was configured to use them; "" otherwise.
    """

    def __init__(self, engine: EmbeddedEngine, used: bool) -> None:
        self.engine, self.runner, self.used = engine, engine.runner, used
        size = padded_rows(engine.settings.max_running_requests)
        self.batch = StaticBatch(size, self.runner.device)
        self.graphs = Graphs(StaticStep(self.runner, self.batch, engine.settings.seed), engine.weight_tensors)
        on_gpu = self.runner.device.type == "cuda"
        self._hosts = [torch.zeros(2, size, dtype=torch.float64, pin_memory=on_gpu) for _ in range(2)]
        self._pending: _Launched | None = None
        self._compared = False
        self.refused = ""

    def step(self, rows: list[Row]) -> Emitted | None:
        """Advance all running rows by one token; None when the step has to run without static buffers."""
        pending, self._pending = self._pending, None
        if pending is None or not pending.waiting:
            if not self.used or not self._make_ready(rows):
                return None
            first = self._shape(rows)
            if not first.draws:
                return self._from_logits(rows, first)
            pending = self._launch(rows, first)
        # rows that joined since that launch are filled from the host
        if len(pending.waiting) == len(rows) and (shape := self._next(pending, rows)) is not None:
            self._pending = self._launch(rows, shape)
        return self._read(pending, rows)

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows that left the cache from the step in flight."""
        if self._pending is not None:
            for row in rows:
                self._pending.waiting.pop(row, None)

    def apply_moves(self, where: np.ndarray, sources: np.ndarray) -> None:
        """Move the state of rows whose slots moved because other rows left."""
        if self._pending is not None:
            self.batch.move(where, sources, self.runner.cache.rows)

    def settle(self) -> None:
        """Discard the step in flight; it will be computed again with the weights in place at that time."""
        pending, self._pending = self._pending, None
        if pending is not None:
            slots = np.fromiter((row.slot for row in pending.waiting), np.int64, len(pending.waiting))
            self.runner.cache.own.lengths[slots] -= 1

    # -- launching --------------------------------------------------------------------------------------------------

    def _shape(self, rows: Sequence[Row]) -> Shape:
        samplings = [row.request.sampling for row in rows]
        draws = not any(s.truncated and s.temperature > 0 for s in samplings)
        mixed = draws and any(s.temperature == 0 for s in samplings)
        return Shape(padded_rows(len(rows)), draws, mixed, frozenset(self.engine.recorded_fields()))

    def _make_ready(self, rows: list[Row]) -> bool:
        """Reserve cache room, record missing graphs and fill the batch. Returns False, after a warning, where that fails."""
        try:
            shape = self._shape(rows)
            self._make_room(rows, shape)
            if not self._compared:
                self._compare(rows)
                self._compared = True
            self._fill(rows)
            if not self.graphs.ready(shape):
                self.graphs.prepare(shape)
                self._fill(rows)
        except NonFiniteError:
            raise
        except (CannotBeStatic, RuntimeError) as error:  # recording fails with RuntimeErrors of many kinds
            self.used, self.refused = False, first_line(error)
            self.graphs.clear()
            log.warning(
                "%s decodes without CUDA graphs, which is slower: %s", type(self.engine.model).__name__, self.refused
            )
            return False
        return True

    def _make_room(self, rows: list[Row], shape: Shape) -> None:
        own = self.runner.cache.own
        length = int(own.lengths[: len(rows)].max())
        left = max(row.limit - len(row.tokens) for row in rows)
        own.reserve(max(shape.rows, own.size), max(length + 2, min(length + left + 1, _ROOM)))

    def _fill(self, rows: list[Row]) -> None:
        """Copy the state of the rows to the batch."""
        cache, samplings = self.runner.cache, [row.request.sampling for row in rows]
        slots = cache.prefix_of[: len(rows)]
        self.batch.fill(
            [row.tokens[-1] for row in rows],
            cache.own.lengths[: len(rows)],
            slots,
            cache.prefixes.lengths[slots],
            [row.request.key for row in rows],
            [sampling.temperature for sampling in samplings],
        )

    def _launch(self, rows: list[Row], shape: Shape) -> _Launched:
        """Run one step on the current batch and start copying its results to the host."""
        self.graphs.run(shape)
        self.runner.cache.own.lengths[: len(rows)] += 1
        self._hosts.reverse()
        host = self._hosts[0]
        host.copy_(self.batch.results, non_blocking=True)
        event = None
        if host.is_pinned():
            event = torch.cuda.Event()
            event.record()
        return _Launched(list(rows), shape, host, event, {row: i for i, row in enumerate(rows)})

    def _next(self, launched: _Launched, rows: list[Row]) -> Shape | None:
        """The shape of the next step of ``rows``, the remaining rows of ``launched``. None where it must wait for the tokens of this step: a
        row would exceed the model's context or the cache's capacity, no row continues, or the step is not recorded."""
        lengths = [len(row.tokens) + 1 for row in rows]
        own = self.runner.cache.own
        possible = (
            max(lengths) < self.engine.max_context
            and any(length < row.limit for length, row in zip(lengths, rows, strict=True))
            and int(own.lengths[: len(rows)].max()) < own.width
        )
        shape = replace(launched.shape, rows=padded_rows(len(rows)))
        if possible and not self.graphs.ready(shape) and launched.shape.rows <= 2 * shape.rows:
            shape = launched.shape  # of a few rows more
        return shape if possible and self.graphs.ready(shape) else None

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, launched: _Launched, rows: Sequence[Row]) -> Emitted:
        """Wait for the step and return its tokens for ``rows``; empty lists for rows that joined after the launch."""
        if launched.event is not None:
            launched.event.synchronize()
        places = [launched.waiting.get(row) for row in rows]
        drawn, log_probs = launched.results[:, : len(launched.rows)].tolist()
        tokens = [[] if i is None else [int(drawn[i])] for i in places]
        found = [[] if i is None else [log_probs[i]] for i in places]
        draw.check_finite(drawn, log_probs, self.runner.vocabulary)
        return Emitted(tokens, found)

    def _from_logits(self, rows: list[Row], shape: Shape) -> Emitted:
        """Run a step that returns logits and sample on the host, which truncated distributions (top-k, top-p) require."""
        logits = self.graphs.run(shape)[: len(rows)]
        self.runner.cache.own.lengths[: len(rows)] += 1
        return to_emitted(self.engine.sample(logits, rows))

    def _compare(self, rows: list[Row]) -> None:
        """Compute one step both ways, once per engine; raise CannotBeStatic if the results differ by more than rounding."""
        shape = Shape(padded_rows(len(rows)), draws=False)
        self._fill(rows)
        self.graphs.prepare(shape)
        static = self.graphs.run(shape)[: len(rows)].float().log_softmax(-1)
        plain = self.engine.forward(rows, [row.tokens[-1:] for row in rows]).logits.float().log_softmax(-1)
        self.runner.cache.own.lengths[: len(rows)] -= 1
        gap = float((static - plain).abs().mean())
        if (
            not gap <= TOLERANCE.get(next(self.engine.model.parameters()).dtype, TOLERANCE_LOW)
            and plain.isfinite().all()
        ):
            raise CannotBeStatic(f"a step in static buffers differs from a plain one by {gap:.2g} nats a token")
