"""The queue of the engine: validates requests, decides when they end, and builds their responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.column import find_token_fault
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.errors import MilesError
from miles_embedded.engine.columns import RowColumns
from miles_embedded.engine.detokenizer import Decode, decode_all
from miles_embedded.engine.row import Row, StopText
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.step import Emitted


class Scheduler:
    """Validates requests, queues them and decides when rows end.

    Args:
        decode: token ids -> text.
        eos: ids that end a response unless ``ignore_eos`` is set.
        max_context: largest sequence length, prompt included.
        vocab: number of token ids.

    Attributes:
        waiting: requests that are not running.
        columns: of the running rows.
    """

    def __init__(self, decode: Decode, eos: Sequence[int], max_context: int, vocab: int) -> None:
        self.decode, self.eos = decode, frozenset(eos)
        self.max_context, self.vocab = max_context, vocab
        self.waiting: deque[Row] = deque()
        self.columns = RowColumns(vocab)

    def make_row(self, request: Request, future: asyncio.Future[Response]) -> Row:
        """Make the row of a valid request; MilesError if the request cannot be generated."""
        length, sampling = len(request.tokens), request.sampling
        room = request.room(self.max_context)
        if find_token_fault(request.tokens, self.vocab):
            bad = next(t for t in request.tokens if not 0 <= t < self.vocab)
            raise MilesError(
                f"request {request.key} has token {bad}, but the model's vocabulary has {self.vocab} tokens"
            )
        if sampling.max_new_tokens < 1:
            raise MilesError(f"request {request.key} sets max_new_tokens to {sampling.max_new_tokens}; set at least 1")
        if not (sampling.temperature >= 0 and 0 <= sampling.top_p <= 1):
            raise MilesError(
                f"request {request.key} has temperature {sampling.temperature} and top_p {sampling.top_p}; "
                "temperature must be at least 0 and top_p between 0 and 1"
            )
        eos = frozenset() if sampling.ignore_eos else self.eos
        return Row(
            request,
            future,
            length,
            length + room,
            eos | frozenset(sampling.stop_token_ids) if sampling.stop_token_ids else eos,
            text=StopText(self.decode, sampling.stop) if sampling.stop else None,
        )

    def accept(self, rows: Sequence[Row], emitted: Emitted | Sampled, versions: np.ndarray) -> list[Row]:
        """Append the tokens of a step; returns the rows that ended. Drops tokens after the end of a row.

        Args:
            rows: rows that the step advanced.
            emitted: their tokens.
            versions: [variants] version of the weights of each variant of the model.
        """
        if isinstance(emitted, Sampled):
            if len(rows) == self.columns.count:
                return self._accept_from_all(rows, emitted, versions)
            emitted = Emitted.of(emitted)
        done = []
        for i, (row, tokens, log_probs) in enumerate(zip(rows, emitted.tokens, emitted.log_probs, strict=True)):
            if tokens and row.version != versions[row.variant]:
                row.begin_version(int(versions[row.variant]))
            for j, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
                if row.records_support and emitted.supports is not None:
                    row.supports.append(emitted.supports[i][j])
                    row.capped += bool(emitted.capped and emitted.capped[i][j])
                if row.add(token, log_prob):
                    done.append(row)
                    break
        self.columns.refresh(rows)
        return done

    def _accept_from_all(self, rows: Sequence[Row], sampled: Sampled, versions: np.ndarray) -> list[Row]:
        """``accept`` for one token of every running row: plain steps, whose host time must not grow with the rows."""
        tokens, log_probs = np.asarray(sampled.tokens), np.asarray(sampled.log_probs)
        columns = self.columns
        ended = columns.append(tokens, log_probs, versions, rows)
        if sampled.supports is not None:
            for i, row in enumerate(rows):
                if row.records_support:
                    row.supports.append(sampled.supports[i])
                    row.capped += bool(sampled.capped and sampled.capped[i])
        return [rows[i] for i in ended if rows[i].ends(int(tokens[i]), int(columns.lengths[i]))]

    def respond(self, rows: Sequence[Row], finish: str, extras: Sequence[dict[str, Any]]) -> None:
        """Resolve the futures of requests with their responses, whose texts are decoded together.

        Args:
            rows: the rows of the requests.
            finish: reason why all of them ended; "" for that of each row.
            extras: recorded fields of each.
        """
        left = [
            (row, finish or row.finish, own) for row, own in zip(rows, extras, strict=True) if not row.future.done()
        ]
        cut = {row: row.text.text for row, why, _ in left if row.text is not None and _is_cut(row, why)}
        whole = [row for row, *_ in left if row not in cut]
        texts = cut | dict(zip(whole, decode_all(self.decode, [row.response.tolist() for row in whole]), strict=True))
        for row, why, own in left:
            text = texts[row]
            if isinstance(text, Exception):  # fails this request only
                row.future.set_exception(text)
            else:
                row.future.set_result(_response(row, why, own, text))


def _is_cut(row: Row, finish: str) -> bool:
    """Whether a stop string ended the row, whose text ends in front of it."""
    return finish == "stop" and row.tokens[-1] not in row.stops


def _response(row: Row, finish: str, extras: dict[str, Any], text: str) -> Response:
    tokens = row.response
    metrics = dict(row.metrics)
    if SAMPLING_SUPPORT.name in row.request.extras:
        # Without truncation nothing is recorded, and an empty support represents the whole vocabulary.
        extras[SAMPLING_SUPPORT.name] = row.supports or [np.zeros(0, np.int32)] * len(tokens)
        metrics["sampling_support_capped"] = float(row.capped)
    return Response(tokens, row.log_probs, finish, text, row.versions, extras, metrics)  # type: ignore[arg-type]
