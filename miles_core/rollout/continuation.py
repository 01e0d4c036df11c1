"""Continuing a response that an engine returned before it was complete.

An aborted response is part of a sample: its tokens, log-probabilities and recorded rows stay, and the next request continues
after them with the same key. Sampling keyed on (seed, key, position) then gives the tokens of a response that was never
aborted, as long as the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.field import Field

Decode = Callable[[list[int]], str]

#: Replacement characters that the parts of a character at the ends of a piece of text can become.
_PARTIAL = 8


def usable(response: Response, request: Request) -> bool:
    """Whether another request can continue an aborted response. One that lacks a requested field cannot be continued: the
    missing rows are unknown."""
    return bool(response.tokens) and request.extras <= response.extras.keys()


def cut_at_stop(parts: list[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> None:
    """End the last part at the token that completes a stop string which began in a part before it: no engine saw it whole.

    Decodes a few tokens on each side of the boundary, so the cost does not depend on the length of the response.
    """
    last = parts[-1]
    before = [token for part in parts[:-1] for token in part.tokens]
    if not stop or not before or not last.tokens:
        return
    reach = max(map(len, stop))
    context = before[-_token_count(before[::-1], reach, decode) :]
    for count in range(1, _token_count(last.tokens, reach, decode) + 1):
        text = decode([*context, *last.tokens[:count]])
        if any(s in text for s in stop):
            parts[-1] = first_tokens(last, count, declared)
            return


def _token_count(tokens: Sequence[int], characters: int, decode: Decode) -> int:
    """How many of the first ``tokens`` surely hold more than ``characters`` characters of text: tokens may be parts of a
    character, or special ones without text."""
    count = characters + 1
    while count < len(tokens) and len(decode(list(tokens[:count]))) <= characters + _PARTIAL:
        count *= 2
    return min(count, len(tokens))


def joined(parts: Sequence[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> Response:
    """Join the parts of a response; each part begins where the one before it ended."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    tokens = [token for part in parts for token in part.tokens]
    text = decode(tokens)
    versions: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        versions += [(start + i, v) for i, v in part.weight_versions if not versions or versions[-1][1] != v]
        start += len(part.tokens)
    return Response(
        tokens,
        [value for part in parts for value in part.log_probs],
        last.finish,
        text[: min((text.index(s) for s in stop if s in text), default=len(text))],
        versions,
        {name: _joined_rows(name, parts, declared) for name in last.extras},
        last.metrics,
    )


def first_tokens(response: Response, count: int, declared: Sequence[Field]) -> Response:
    """``response`` as it was after ``count`` tokens, with the finish ``stop``."""
    gone = len(response.tokens) - count
    aligned = {spec.name: spec.align for spec in declared}
    extras = {
        name: rows if aligned.get(name) == "sample" else rows[: len(rows) - gone]
        for name, rows in response.extras.items()
    }
    versions = [(index, version) for index, version in response.weight_versions if index < count]
    return replace(
        response,
        tokens=response.tokens[:count],
        log_probs=response.log_probs[:count],
        finish="stop",
        weight_versions=versions,
        extras=extras,
    )


def _joined_rows(name: str, parts: Sequence[Response], declared: Sequence[Field]) -> Any:
    """Join a field's rows: ``response`` rows follow each other; of rows that several parts report, the earliest is kept."""
    aligned = next((spec.align for spec in declared if spec.name == name), "response")
    found = parts[0].extras[name]
    for part in parts[1:]:
        more = part.extras[name] if aligned == "response" else part.extras[name][len(found) :]
        found = [*found, *more] if isinstance(found, list) else np.concatenate([found, more])
    return found
