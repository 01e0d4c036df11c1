"""Rows: requests while they are being generated. When one is finished, and what its text is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.engine import Request, Response
from miles_core.data.field import SAMPLING_SUPPORT
from miles_core.errors import MilesError
from miles_embedded.engine.decoder import Emitted
from miles_embedded.engine.sampling import Params, params_of, uniform

Decode = Callable[[list[int]], str]


@dataclass(eq=False)
class Row:
    """One request in the engine.

    Attributes:
        tokens: prompt and response so far; the last one is not yet in the cache.
        prompt_length: tokens of the prompt.
        limit: length at which it ends for lack of budget or context.
        stops: token ids that end it.
        log_probs, versions, supports, capped: the response's, see ``Response`` and ``Emitted``.
        kept: recorded fields of tokens whose cache was dropped; they stay in force when it is computed again.
        slot: where the cache holds it, -1 outside.
        fields: recorded fields it asked for, without the sampling support.
        records_support: it wants its sampling support, and has one.
        anew: all of its tokens are computed as one prompt when it joins again.
        metrics: numbers that the decoder keeps about it; the response's.
        finish: why it ended, "" while it runs.
    """

    request: Request
    future: asyncio.Future[Response]
    tokens: list[int]
    prompt_length: int
    limit: int
    stops: frozenset[int]
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
    capped: int = 0
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    slot: int = -1
    anew: bool = False
    finish: str = ""
    text: StopText | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fields = self.request.extras - {SAMPLING_SUPPORT.name}
        self.records_support = self.request.sampling.truncated and SAMPLING_SUPPORT.name in self.request.extras

    @property
    def start(self) -> tuple[int, ...]:
        """What is computed as one prompt when the row joins: the prompt, and after a retract all but the last token (or ``anew``)."""
        return tuple(self.tokens[:-1] if self.log_probs and not self.anew else self.tokens)

    @property
    def response(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length :]


class StopText:
    """The response's text, decoded as it grows, to find a stop string in it.

    A token may end inside a character (byte-level vocabularies) or decode differently at the start of a text (a leading
    space), so new text is the difference between decoding a few tokens with and without the new ones, held back
    while it ends in an incomplete character (Text Generation Inference and vLLM do the same).
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self.decode, self.stop = decode, tuple(stop)
        self.tokens: list[int] = []
        self.text = ""
        self._from = self._read = 0

    def add(self, token: int) -> bool:
        """Take one token; True when a stop string is complete, and ``text`` is then cut before it."""
        self.tokens.append(token)
        known = self.decode(self.tokens[self._from : self._read])
        now = self.decode(self.tokens[self._from :])
        if len(now) <= len(known) or now.endswith("\ufffd"):
            return False
        before = len(self.text)
        self.text += now[len(known) :]
        self._from, self._read = self._read, len(self.tokens)
        found = [i for s in self.stop if (i := self.text.find(s, max(before - len(s) + 1, 0))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


class Scheduler:
    """Who waits and who ends.

    Args:
        decode: token ids to text.
        eos: ids that end a response unless ``ignore_eos``.
        max_context: longest sequence, prompt included.
        vocab: number of token ids.
    """

    def __init__(self, decode: Decode, eos: Sequence[int], max_context: int, vocab: int) -> None:
        self.decode, self.eos = decode, frozenset(eos)
        self.max_context, self.vocab = max_context, vocab
        self.waiting: deque[Row] = deque()

    def make_row(self, request: Request, future: asyncio.Future[Response]) -> Row:
        """Check a request; MilesError when it cannot be generated."""
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
            raise MilesError(f"request {request.key} has token {bad}, the model's vocabulary has {self.vocab}")
        if sampling.max_new_tokens < 1:
            raise MilesError(f"request {request.key} asks for {sampling.max_new_tokens} new tokens; ask for at least 1")
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

    def accept(self, rows: Sequence[Row], emitted: Emitted, version: int) -> list[Row]:
        """Append what a step emitted; returns the rows that ended. Tokens after an end are dropped."""
        done = []
        for i, (row, tokens, log_probs) in enumerate(zip(rows, emitted.tokens, emitted.log_probs, strict=True)):
            if tokens and (not row.versions or row.versions[-1][1] != version):
                row.versions.append((len(row.tokens) - row.prompt_length, version))
            for j, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
                row.tokens.append(token)
                row.log_probs.append(log_prob)
                if row.records_support and emitted.supports is not None:
                    row.supports.append(emitted.supports[i][j])
                    row.capped += bool(emitted.capped and emitted.capped[i][j])
                if token in row.stops or (row.text is not None and row.text.add(token)):
                    row.finish = "stop"
                elif len(row.tokens) >= row.limit:
                    row.finish = "length"
                if row.finish:
                    done.append(row)
                    break
        return done

    def respond(self, row: Row, finish: str, extras: dict[str, Any]) -> None:
        """Hand the result to whoever waits for it."""
        if row.future.done():
            return
        try:
            row.future.set_result(self._response(row, finish, extras))
        except Exception as error:  # a tokenizer that fails must not leave this request, or others, without an answer
            row.future.set_exception(error)

    def _response(self, row: Row, finish: str, extras: dict[str, Any]) -> Response:
        tokens = row.response
        text = row.text.text if row.text is not None and finish == "stop" and row.tokens[-1] not in row.stops else None
        metrics = dict(row.metrics)
        if SAMPLING_SUPPORT.name in row.request.extras:
            # No row recorded anything: nothing was truncated, and an empty support means the whole vocabulary.
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


def slots_of(rows: Sequence[Row]) -> np.ndarray:
    """[rows] where the cache holds them."""
    return np.fromiter((row.slot for row in rows), np.int64, len(rows))


def parameters_of(rows: Sequence[Row], device: torch.device) -> tuple[Params, Tensor, Tensor | None]:
    """The parameters of ``rows``, their keys [rows] int64, and which record their support [rows] bool (None where none does)."""
    records = [row.records_support for row in rows]
    return (
        params_of([row.request.sampling for row in rows], device),
        torch.tensor([row.request.key for row in rows], dtype=torch.int64, device=device),
        torch.tensor(records, device=device) if any(records) else None,
    )


def uniform_of(seed: int, rows: Sequence[Row], keys: Tensor, positions: Tensor | None, stream: int) -> Tensor:
    """``sampling.uniform`` at ``positions``, by default those of each row's next token."""
    if positions is None:
        positions = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64, device=keys.device)
    return uniform(seed, keys, positions, stream)
