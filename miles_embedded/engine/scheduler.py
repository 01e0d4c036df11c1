"""The queue of the engine: validates requests, decides when they end, and builds their responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.errors import MilesError
from miles_embedded.engine.row import Decode, Row, StopText
from miles_embedded.engine.sampling import Sampled
from miles_embedded.engine.step import Emitted


class Scheduler:
    """Validates requests, queues them and decides when rows end.

    Args:
        decode: token ids -> text.
        eos: ids that end a response unless ``ignore_eos`` is set.
        max_context: largest sequence length, prompt included.
        vocab: number of token ids.
    """

    def __init__(self, decode: Decode, eos: Sequence[int], max_context: int, vocab: int) -> None:
        self.decode, self.eos = decode, frozenset(eos)
        self.max_context, self.vocab = max_context, vocab
        self.waiting: deque[Row] = deque()

    def make_row(self, request: Request, future: asyncio.Future[Response]) -> Row:
        """Make the row of a valid request; MilesError if the request cannot be generated."""
        length, sampling = len(request.tokens), request.sampling
        if not length:
            raise MilesError(f"request {request.key} has an empty prompt; give at least one token")
        if length >= self.max_context:
            raise MilesError(
                f"the prompt of request {request.key} has {length} tokens and leaves no room in the context of "
                f"{self.max_context}; shorten or filter prompts, or raise the context length"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.vocab:
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
            list(request.tokens),
            length,
            min(length + sampling.max_new_tokens, self.max_context),
            eos | frozenset(sampling.stop_token_ids) if sampling.stop_token_ids else eos,
            text=StopText(self.decode, sampling.stop) if sampling.stop else None,
        )

    def accept(self, rows: Sequence[Row], emitted: Emitted | Sampled, version: int) -> list[Row]:
        """Append the tokens of a step; returns the rows that ended. Drops tokens after the end of a row."""
        if isinstance(emitted, Sampled):
            return self._accept_one_each(rows, emitted, version)
        done = []
        for i, (row, tokens, log_probs) in enumerate(zip(rows, emitted.tokens, emitted.log_probs, strict=True)):
            if tokens and row.version != version:
                row.begin_version(version)
            for j, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
                if row.records_support and emitted.supports is not None:
                    row.supports.append(emitted.supports[i][j])
                    row.capped += bool(emitted.capped and emitted.capped[i][j])
                if row.add(token, log_prob):
                    done.append(row)
                    break
        return done

    def _accept_one_each(self, rows: Sequence[Row], sampled: Sampled, version: int) -> list[Row]:
        """``accept`` for one token per row. This runs for every token of plain steps."""
        done = []
        for row, token, log_prob in zip(rows, sampled.tokens, sampled.log_probs, strict=True):
            if row.version != version:
                row.begin_version(version)
            if row.add(token, log_prob):
                done.append(row)
        if sampled.supports is not None:
            for i, row in enumerate(rows):
                if row.records_support:
                    row.supports.append(sampled.supports[i])
                    row.capped += bool(sampled.capped and sampled.capped[i])
        return done

    def respond(self, row: Row, finish: str, extras: dict[str, Any]) -> None:
        """Resolve the future of the request with its response."""
        if row.future.done():
            return
        try:
            row.future.set_result(self._response(row, finish, extras))
        except Exception as error:  # a failing tokenizer must fail this request only, and must not leave it unanswered
            row.future.set_exception(error)

    def _response(self, row: Row, finish: str, extras: dict[str, Any]) -> Response:
        tokens = row.response
        text = row.text.text if row.text is not None and finish == "stop" and row.tokens[-1] not in row.stops else None
        metrics = dict(row.metrics)
        if SAMPLING_SUPPORT.name in row.request.extras:
            # Without truncation nothing is recorded, and an empty support represents the whole vocabulary.
            extras[SAMPLING_SUPPORT.name] = row.supports or [np.zeros(0, np.int32)] * len(tokens)
            metrics["sampling_support_capped"] = float(row.capped)
        return Response(
            tokens,
            row.log_probs,
            finish,  # type: ignore[arg-type]
            self.decode(tokens) if text is None else text,
            row.versions,
            extras,
            metrics,
        )


def detokenizer(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function from token ids to text without special tokens; it calls the Rust tokenizer directly where possible."""
    if tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        backend = tokenizer.backend_tokenizer
        return lambda tokens: backend.decode(tokens, skip_special_tokens=True)
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
