"""Runs steps with drafts over static buffers, on a GPU as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles_core.plugin import NonFiniteError
from miles_embedded import TOLERANCE, TOLERANCE_LOW, CannotBeStatic, Emitted, StaticBatch, check_finite, padded_rows
from miles_speculative.draft import Draft
from miles_speculative.drafted_step import DraftedShape, DraftedStep

log = logging.getLogger(__name__)

#: New tokens per row to reserve cache room for at once.
_ROOM = 512


class StaticDrafts:
    """Static steps with drafts for one engine.

    The state of the rows stays on the device from step to step; it is filled from the host when rows joined or left.

    Args:
        engine: the engine.
        draft: the draft of its model.
        most: largest number of drafts per step.

    Attributes:
        refused: why static steps are not used; "" while they are.
        steady: whether the last step needed no recording.
    """

    def __init__(self, engine: Any, draft: Draft, most: int) -> None:
        self.engine, self.runner, self.most = engine, engine.runner, most
        self.batch = StaticBatch(padded_rows(engine.settings.max_running_requests), self.runner.device)
        self.state = DraftedStep(self.runner, self.batch, draft, most, engine.settings.seed)
        self.graphs = self.runner.graphs_of(self.state, engine.weight_tensors)
        self.refused, self.steady = "", False
        self._rows: list[Any] = []
        self._checked = False

    def step(self, rows: list[Any], k: int, states: dict[Any, list[Tensor]]) -> Emitted | None:
        """Advance all running rows; None if the step has to run without static buffers.

        Args:
            rows: the running rows, in slot order.
            k: number of drafts; 0 for none.
            states: row -> hidden states before its last tokens, which the draft has not processed. Read for rows that joined; the lists
                of all rows are filled again if static steps are refused.
        """
        shape = self._shape(rows, k)
        if self.refused or shape is None:
            self._return_states(states)
            return None
        before: list[Tensor] | None = None
        try:
            self._prepare(rows, shape, states)
            before = None if self._checked else self._save()
            self.graphs.run(shape)
            emitted = self._read(rows, k)
            if before is not None:
                self._check(rows, emitted)
                self._checked = True
        except NonFiniteError:
            raise
        except (CannotBeStatic, RuntimeError) as error:  # recording fails with RuntimeErrors of many kinds
            self.refused = str(error).partition("\n")[0]
            log.warning(
                "%s drafts without CUDA graphs, which is slower: %s", type(self.engine.model).__name__, self.refused
            )
            if before is not None:
                self._restore(before)
            self._return_states(states)
            self.graphs.clear()
            return None
        self.runner.cache.own.lengths[: len(rows)] += [len(tokens) for tokens in emitted.tokens]
        return emitted

    def forget(self) -> None:
        """Forget the state of all rows, because they advanced elsewhere."""
        self._rows, self.steady = [], True

    def _shape(self, rows: Sequence[Any], k: int) -> DraftedShape | None:
        """The shape of the step; None where the host samples (truncated distributions) or positions would exceed the context."""
        samplings = [row.request.sampling for row in rows]
        truncated = any(s.truncated and s.temperature > 0 for s in samplings)
        if truncated or max(len(row.tokens) for row in rows) + self.most + 1 > self.engine.max_context:
            return None
        mixed = any(s.temperature == 0 for s in samplings)
        return DraftedShape(padded_rows(len(rows)), k, mixed, frozenset(self.engine.recorded_fields()))

    def _prepare(self, rows: list[Any], shape: DraftedShape, states: dict[Any, list[Tensor]]) -> None:
        """Reserve room, fill the buffers if the rows changed, and record the step if necessary."""
        own = self.runner.cache.own
        length = int(own.lengths[: len(rows)].max())
        left = max(row.limit - len(row.tokens) for row in rows)
        own.reserve(max(shape.rows, own.size), length + 2 * self.most + 3 + min(left, _ROOM))
        if rows != self._rows:
            self._fill(rows, states)
        self.steady = self._checked and self.graphs.ready(shape)
        if not self.graphs.ready(shape):
            before = self._save()
            self.graphs.prepare(shape)
            self._restore(before)

    def _fill(self, rows: list[Any], states: dict[Any, list[Tensor]]) -> None:
        """Copy the rows to the buffers: known ones from their former places, joined ones from the host."""
        cache, state, count = self.runner.cache, self.state, len(rows)
        places = {id(row): i for i, row in enumerate(self._rows)}
        source = torch.tensor([places.get(id(row), 0) for row in rows], device=self.runner.device)
        for buffer in (state.hidden, state.unread, state.fresh):
            buffer[:count] = buffer.index_select(0, source)
        for i, row in enumerate(rows):
            if id(row) not in places:
                pieces = torch.cat(states[row])[-state.width :]
                state.hidden[i, : len(pieces)] = pieces
                tokens = torch.tensor(row.tokens[-len(pieces) :])
                state.unread[i, : len(pieces)] = tokens.to(self.runner.device)
                state.fresh[i] = len(pieces)
                states[row] = []
        limits = torch.zeros(self.batch.size, dtype=torch.int64)
        limits[:count] = torch.tensor([row.limit for row in rows])
        state.limits.copy_(limits)
        state.fresh[count:] = 1
        slots = cache.prefix_of[:count]
        self.batch.fill(
            [row.tokens[-1] for row in rows],
            cache.own.lengths[:count],
            slots,
            cache.prefixes.lengths[slots],
            [row.request.key for row in rows],
            [row.request.sampling.temperature for row in rows],
        )
        self._rows = list(rows)

    def _read(self, rows: Sequence[Any], k: int) -> Emitted:
        """Wait for the step and return the tokens of each row."""
        drawn, log_probs = self.state.results[:, : len(rows), : k + 1].cpu()
        counts = (self.state.kept[: len(rows)] + 1).tolist()
        tokens = [[int(t) for t in row[:n]] for row, n in zip(drawn.tolist(), counts, strict=True)]
        found = [row[:n] for row, n in zip(log_probs.tolist(), counts, strict=True)]
        check_finite([t for row in tokens for t in row], [p for row in found for p in row], self.runner.vocabulary)
        return Emitted(tokens, found)

    def _save(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._buffers()]

    def _restore(self, saved: list[Tensor]) -> None:
        for buffer, before in zip(self._buffers(), saved, strict=True):
            buffer.copy_(before)

    def _buffers(self) -> tuple[Tensor, ...]:
        state = self.state
        return (self.batch.tokens, self.batch.lengths, state.hidden, state.unread, state.fresh)

    def _return_states(self, states: dict[Any, list[Tensor]]) -> None:
        """Hand the hidden states of the rows back to ``states``, for steps from Python."""
        fresh = self.state.fresh.tolist() if self._rows else []
        for i, row in enumerate(self._rows):
            if row in states and not states[row]:
                states[row] = [self.state.hidden[i, : fresh[i]].clone()]
        self._rows = []

    def _check(self, rows: list[Any], emitted: Emitted) -> None:
        """Compare the log-probabilities of a step, once per engine, with those of a plain forward; raise CannotBeStatic if they differ by more
        than rounding."""
        fed = [[row.tokens[-1], *tokens[:-1]] for row, tokens in zip(rows, emitted.tokens, strict=True)]
        lengths = self.runner.cache.own.lengths[: len(rows)].copy()
        counts = torch.tensor([len(tokens) for tokens in fed], device=self.runner.device)
        full = self.engine.distribution(self.engine.forward(rows, fed).logits, rows, counts).full
        self.runner.cache.own.lengths[: len(rows)] = lengths
        tokens = torch.tensor([t for each in emitted.tokens for t in each], device=full.device)
        found = torch.tensor([p for each in emitted.log_probs for p in each], device=full.device)
        gap = float((full.gather(1, tokens[:, None]).squeeze(1) - found).abs().mean())
        if not gap <= TOLERANCE.get(next(self.engine.model.parameters()).dtype, TOLERANCE_LOW):
            raise CannotBeStatic(f"a step in static buffers differs from a plain one by {gap:.2g} nats a token")
