"""Going on from what an engine returned before it was done.

An aborted response is part of a sample: its tokens, log-probabilities and recorded rows stay, and the next request goes on
behind them with the same key. Sampling keyed on (seed, key, position) then gives the tokens of a response that was never
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


def usable(response: Response, request: Request) -> bool:
    """Whether a further request can go on from an aborted response. One without a field that was asked for is of no use: its
    rows could only be made up."""
    return bool(response.tokens) and request.extras <= response.extras.keys()


def cut_at_stop(parts: list[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> None:
    """Let the last part end where a stop string is complete that began in a part before it, which no engine saw whole."""
    last = parts[-1]
    before = [token for part in parts[:-1] for token in part.tokens]
    for count in range(1, len(last.tokens) + 1) if stop and before else ():
        text = decode([*before, *last.tokens[:count]])
        if any(s in text for s in stop):
            parts[-1] = _first_tokens(last, count, declared)
            return


def joined(parts: Sequence[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> Response:
    """The parts of one response as the one that it would have been; each part began where the one before it ended."""
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


def _first_tokens(response: Response, count: int, declared: Sequence[Field]) -> Response:
    """``response`` as it was after ``count`` tokens, ended by a stop string."""
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
    """A field's rows: response rows follow each other; of rows that several parts report, the earliest stays in force."""
    aligned = next((spec.align for spec in declared if spec.name == name), "response")
    found = parts[0].extras[name]
    for part in parts[1:]:
        more = part.extras[name] if aligned == "response" else part.extras[name][len(found) :]
        found = [*found, *more] if isinstance(found, list) else np.concatenate([found, more])
    return found
