"""Rounds of drafting and verifying in static buffers, launched one ahead of the host; on a GPU as CUDA graphs (``miles_embedded.AsyncScheduling``).

Rows enter the buffers with the hidden states that the decoder kept for them, and ``release`` returns these to the decoder, which runs the
steps that cannot be static.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles_embedded import AsyncScheduling, Emitted, Launched, Row, StepEngine, check_finite, fill_rows, padded_rows
from miles_speculative.decoder import UNREAD, SpeculativeDecoder, room_of
from miles_speculative.round_batch import RoundBatch
from miles_speculative.static_round import RoundShape, StaticRound

log = logging.getLogger(__name__)


class AsyncRounds(AsyncScheduling[RoundShape]):
    """Static rounds for ``decoder``.

    Args:
        engine: the engine that decodes with ``decoder``.
        decoder: a decoder with chain drafts.
        used: whether static rounds are enabled.
    """

    def __init__(self, engine: StepEngine, decoder: SpeculativeDecoder, used: bool) -> None:
        self.decoder = decoder
        size = padded_rows(engine.settings.max_running_requests)
        most = decoder.lookahead.most
        waiting = max(UNREAD, most + 1) if decoder.lookahead.rests else most + 1
        batch = RoundBatch(size, engine.runner.device, most, waiting)
        step = StaticRound(engine.runner, batch, lambda: decoder.draft, engine.settings.seed, engine.max_context)
        super().__init__(engine, used, batch, step)
        #: row in the buffers -> number of its last tokens that wait for the draft
        self._unread: dict[Row, int] = {}
        self._launched_at = self._read_at = 0.0
        #: batch size (bit length) and number of drafts of the next round, once chosen
        self._chosen: tuple[int, int] | None = None
        self._warned = False

    def step(self, rows: list[Row]) -> Emitted | None:
        """Advance all running rows by a round; None if the step has to run without static buffers."""
        pending, self._pending = self._pending, None
        if pending is None or not pending.occupied:
            if not self.used or not self._can_draw(rows):
                return None
            shape = self._shape(rows, self._choose(rows), self._most_unread(rows))
            if not self._make_ready(rows, shape):
                return None
            pending = self._start(rows, shape)
        # rows that joined since that launch are filled from the host
        started = self._read_at, self._launched_at
        if pending.covers(len(rows)) and (following := self._next(pending, rows)) is not None:
            self._pending = self._start(rows, following)
        return self._read(pending, rows, max(started))

    def leave(self, rows: Sequence[Row]) -> None:
        super().leave(rows)
        for row in rows:
            self._unread.pop(row, None)

    def apply_moves(self, where: np.ndarray, sources: np.ndarray) -> None:
        """See ``AsyncScheduling``; also moves the rings while no round is in flight."""
        if self._pending is not None:
            self._pending.move(where, sources, self.runner.cache.rows)
        self.batch.move(where, sources, self.runner.cache.rows)

    def release(self, rows: Sequence[Row]) -> dict[Row, Tensor]:
        """Remove rows from the buffers; returns the hidden states [n, hidden] that wait with their last n tokens. No round is in flight."""
        own = self.runner.cache.own
        inside = [row for row in rows if row in self._unread]
        return {
            row: self.batch.take(row.slot, int(own.lengths[row.slot]), self._unread.pop(row)).clone() for row in inside
        }

    # -- launching --------------------------------------------------------------------------------------------------

    def _can_draw(self, rows: Sequence[Row]) -> bool:
        """Whether all rows sample from the whole vocabulary. Warns once otherwise."""
        samplings = [row.request.sampling for row in rows]
        possible = not any(s.truncated and s.temperature > 0 for s in samplings)
        if not possible and not self._warned:
            self._warned = True
            log.warning(
                "drafts of requests with top-k or top-p decode without CUDA graphs, because the host sorts the vocabulary"
            )
        return possible

    def _most_unread(self, rows: Sequence[Row]) -> int:
        """The largest number of tokens per row that will wait for the draft once the rows are in the buffers."""
        waiting = [self._unread.get(row) or self.decoder.count_fresh(row) for row in rows]
        return min(max(waiting), self.batch.waiting)

    def _shape(self, rows: Sequence[Row], k: int, unread: int) -> RoundShape:
        mixed = any(row.request.sampling.temperature == 0 for row in rows)
        read = 0 if not k else k + 1 if unread <= k + 1 else self.batch.waiting
        return RoundShape(padded_rows(len(rows)), k, read, mixed, frozenset(self.engine.recorded_fields()))

    def _next(self, launched: Launched[RoundShape], rows: list[Row]) -> RoundShape | None:
        """The shape of the round after ``launched`` for the same rows. None where it must wait for the tokens of ``launched``: no row
        continues, the cache is full, or the round is not recorded."""
        if not any(room_of(row) > 0 for row in rows):
            return None
        drafts = launched.shape.drafts
        unread = drafts + 1 if drafts else min(self._most_unread(rows) + 1, self.batch.waiting)
        if not self._has_room(rows, RoundShape(len(rows), self.batch.most, self.batch.waiting)):
            return None
        shape = self._shape(rows, self._choose(rows), unread)
        if not self.graphs.ready(shape) and launched.shape.rows <= 2 * shape.rows:
            shape = replace(shape, rows=launched.shape.rows)  # a few rows more
        return shape if self.graphs.ready(shape) else None

    def _choose(self, rows: Sequence[Row]) -> int:
        """Choose the number of drafts of the next round, once until it is launched."""
        size = len(rows).bit_length()
        if self._chosen is None or self._chosen[0] != size:
            self._chosen = size, self.decoder.lookahead.choose(len(rows))
        return self._chosen[1]

    def _start(self, rows: list[Row], shape: RoundShape) -> Launched[RoundShape]:
        self._launched_at, self._chosen = self.decoder.now(), None
        return self._launch(rows, shape)

    def _fill(self, rows: list[Row]) -> None:
        own, waiting = self.runner.cache.own, self.batch.waiting
        for row in rows:
            if row not in self._unread:
                hidden = self.decoder.take_fresh(row)[-waiting:]
                self.batch.put(row.slot, int(own.lengths[row.slot]), row.tokens[-len(hidden) :], hidden)
                self._unread[row] = len(hidden)
        unread, room = [self._unread[row] for row in rows], [max(room_of(row), 0) for row in rows]
        fill_rows(self.batch, self.engine, rows, unread, room)

    def _compare(self, rows: list[Row], shape: RoundShape) -> None:
        """See ``AsyncScheduling``; compares the policy's logits for drafts. The draft itself only affects acceptance."""
        if not shape.drafts:
            shape = self._shape(rows, 1, self._most_unread(rows))
        self._fill(rows)
        self.graphs.prepare(shape)
        self._fill(rows)
        static = self.graphs.run(shape).view(shape.rows, shape.drafts + 1, -1)
        chains = [
            chain[: max(room_of(row), 0) + 1]
            for row, chain in zip(rows, self.batch.chain[:, : shape.drafts + 1].tolist(), strict=False)
        ]
        plain = self.engine.forward(rows, chains).logits
        self.runner.cache.own.lengths[: len(rows)] -= [len(chain) for chain in chains]
        self._check_gap(torch.cat([static[i, : len(chain)] for i, chain in enumerate(chains)]), plain)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, launched: Launched[RoundShape], rows: Sequence[Row], started: float) -> Emitted:
        """Wait for the round and return its tokens for ``rows``; empty lists for rows that joined after the launch."""
        k = launched.shape.drafts
        results = launched.wait()
        counts = results[-1].long().tolist()
        drawn, log_probs = (part.t().tolist() for part in (results[: k + 1], results[k + 1 : 2 * k + 2]))
        self._read_at = self.decoder.now()
        tokens: list[list[int]] = []
        found: list[list[float]] = []
        for row, i in zip(rows, launched.find(len(rows)).tolist(), strict=True):
            many = 0 if i < 0 else counts[i]
            tokens.append([] if i < 0 else [int(token) for token in drawn[i][:many]])
            found.append([] if i < 0 else log_probs[i][:many])
            if i >= 0:
                self.runner.cache.own.lengths[row.slot] -= k + 1 - many
                self._unread[row] = many if k else min(self._unread[row] + 1, self.batch.waiting)
        check_finite([t for each in tokens for t in each], [p for each in found for p in each], self.runner.vocabulary)
        read = [(row, len(each) - 1) for row, each in zip(rows, tokens, strict=True) if each]
        steady = launched.shape.read <= k + 1
        self.decoder.count_round(
            [row for row, _ in read], k, [kept for _, kept in read], self._read_at - started, steady
        )
        return Emitted(tokens, found)


def use_rounds(engine: StepEngine, decoder: SpeculativeDecoder, used: bool) -> None:
    """Let ``decoder``, the decoder of ``engine``, use static rounds, which are enabled if ``used``."""
    engine.async_steps = decoder.rounds = AsyncRounds(engine, decoder, used)
