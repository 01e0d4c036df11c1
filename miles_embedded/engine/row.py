"""A request in the engine, and the inputs that a step reads from several requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miles_core.contracts.answer import Answer
from miles_core.contracts.engine import Request
from miles_core.data.column import FLOATS, TOKENS, Column
from miles_core.data.field import SAMPLING_SUPPORT
from miles_embedded.engine.detokenizer import Decode
from miles_embedded.engine.prefixes import Key
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.sampling import Params, params_of


class Reader(Protocol):
    """Holds tokens that rows have not read yet, see ``RowColumns``."""

    def read(self, row: Row) -> None:
        """Append the tokens of a row that it has not read yet to the row."""


@dataclass(eq=False)
class Row:
    """A request in the engine.

    Attributes:
        prompt_length: number of prompt tokens.
        limit: total length at which generation stops, from the token budget and the context.
        stops: token ids that end the response.
        versions, supports, capped: of the response, see ``Response`` and ``Emitted``.
        version: version of the weights that generated the last token, None before the first one.
        saved: recorded fields of tokens that left the cache; they take precedence when these tokens are computed again.
        slot: cache slot, -1 outside the cache.
        fields: names of the requested recorded fields, without the sampling support.
        records_support: whether to record the sampling support: it is requested, and the sampling is truncated.
        recompute: recompute all tokens as one prompt when the row joins again.
        offset: difference between position and index of the tokens after the prompt; not 0 for prompts with images in some families.
        metrics: numbers that the decoder adds to the response.
        finish: reason why the row ended, "" while it runs.
        columns: of the running rows, while this is one of them.
        variant: index of the variant of the model that generates (``miles_embedded.model.variants``).
    """

    request: Request
    future: Answer
    prompt_length: int
    limit: int
    stops: frozenset[int]
    versions: list[tuple[int, int]] = field(default_factory=list)
    version: int | None = None
    supports: list[np.ndarray] = field(default_factory=list)
    capped: int = 0
    saved: dict[str, np.ndarray] = field(default_factory=dict)
    slot: int = -1
    recompute: bool = False
    finish: str = ""
    text: StopText | None = None
    offset: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    columns: Reader | None = None
    variant: int = 0

    def __post_init__(self) -> None:
        self._tokens, self._log_probs = Column(TOKENS, self.request.tokens), Column(FLOATS)
        self.fields = self.request.extras - {SAMPLING_SUPPORT.name}
        self.records_support = self.request.sampling.truncated and SAMPLING_SUPPORT.name in self.request.extras

    @property
    def tokens(self) -> Column:
        """Prompt and response so far; the last token is not cached yet."""
        if self.columns is not None:
            self.columns.read(self)
        return self._tokens

    @property
    def log_probs(self) -> Column:
        """Log-probabilities of the response so far, see ``Response``."""
        if self.columns is not None:
            self.columns.read(self)
        return self._log_probs

    @property
    def start(self) -> Key:
        """What to compute as one prefix when the row joins: the prompt, or after a retract all tokens but the last (see ``recompute``)."""
        tokens = self.tokens[:-1] if self.log_probs and not self.recompute else self.tokens
        return Key(tuple(tokens), self.request.media, self.variant)

    @property
    def response(self) -> Column:
        """Tokens generated so far."""
        response: Column = self.tokens[self.prompt_length :]
        return response

    def begin_version(self, version: int) -> None:
        """Note that the next tokens are generated with weights of ``version``."""
        self.version = version
        self.versions.append((len(self.tokens) - self.prompt_length, version))

    def append_bytes(self, tokens: bytes, log_probs: bytes) -> None:
        """Append generated tokens, int32, and their log-probabilities, float64."""
        self._tokens.frombytes(tokens)
        self._log_probs.frombytes(log_probs)

    def add(self, token: int, log_prob: float) -> bool:
        """Append a generated token; returns whether the row ended, see ``ends``."""
        self.tokens.append(token)
        self._log_probs.append(log_prob)
        return self.ends(token, len(self._tokens))

    def ends(self, token: int, length: int) -> bool:
        """Whether the row ends with its new last ``token``, the token number ``length``; sets ``finish`` then."""
        if token in self.stops or (self.text is not None and self.text.add(token)):
            self.finish = "stop"
        elif length >= self.limit:
            self.finish = "length"
        else:
            return False
        return True


class StopText:
    """Incrementally decoded text of a response, searched for stop strings.

    A token may end inside a character (byte-level vocabularies) or decode differently at the start of a text (leading space). New
    text is therefore the difference between decoding a few tokens with and without the new token, and is withheld while it ends
    with an incomplete character (as in Text Generation Inference and vLLM).
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self.decode, self.stop = decode, tuple(stop)
        self.tokens: list[int] = []
        self.text = ""
        self._from = self._read = 0

    def add(self, token: int) -> bool:
        """Append one token; returns True when a stop string is complete, after cutting ``text`` in front of it."""
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


def slots_of(rows: Sequence[Row]) -> np.ndarray:
    """[rows] cache slots of the rows."""
    return np.fromiter((row.slot for row in rows), np.int64, len(rows))


def recorded_rows(runner: Runner, names: Collection[str], rows: Sequence[Row]) -> list[dict[str, np.ndarray]]:
    """Return the values that each row requested among the recorded fields ``names``: one entry per token except the last. Saved values
    replace those of recomputed tokens, because they belong to the pass that sampled the tokens."""
    found: list[dict[str, np.ndarray]] = [{} for _ in rows]
    for name in names:
        requested = [i for i, row in enumerate(rows) if name in row.request.extras]
        recorded = runner.fields(slots_of([rows[i] for i in requested]), name) if requested else []
        for i, values in zip(requested, recorded, strict=True):
            row = rows[i]
            saved = row.saved.get(name)
            if saved is not None:
                values = np.concatenate([saved, values[len(saved) :]])
            found[i][name] = values[: len(row.tokens) - 1]
    return found


def parameters_of(rows: Sequence[Row], device: torch.device) -> tuple[Params, Tensor, Tensor | None]:
    """Return sampling parameters, keys [rows] int64, and which rows record their support [rows] bool (None if no row does)."""
    records = [row.records_support for row in rows]
    return (
        params_of([row.request.sampling for row in rows], device),
        torch.tensor([row.request.key for row in rows], dtype=torch.int64, device=device),
        torch.tensor(records, device=device) if any(records) else None,
    )
