"""Continues responses that an engine aborted before they were complete.

The tokens, log-probabilities and recorded rows of an aborted response are kept, and the next request continues after them
with the same key. Because sampling is keyed on (seed, key, position), the result equals that of an uninterrupted response,
as long as the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.field import Field

if TYPE_CHECKING:
    from miles_core.config.config import Config


Decode = Callable[[list[int]], str]

#: Upper bound on replacement characters that incomplete characters at both ends of a decoded piece can produce.
_PARTIAL = 8


def can_continue(response: Response, request: Request) -> bool:
    """Return whether another request can continue an aborted response. It cannot if the response has no tokens or lacks a
    requested field, because the missing rows are unknown."""
    return bool(response.tokens) and request.extras <= response.extras.keys()


def cut_at_stop(parts: list[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> None:
    """Cut the last part after the token that completes a stop string which began in an earlier part.

    The engine cannot detect such a stop string, because no single request generated all of it. Only a few tokens on each side of
    the boundary are decoded, so the cost does not depend on the length of the response.
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
    """Return how many of the first ``tokens`` are needed to decode to more than ``characters`` characters. The count grows by
    doubling, because a token may be a part of a character or a special token without text."""
    count = characters + 1
    while count < len(tokens) and len(decode(list(tokens[:count]))) <= characters + _PARTIAL:
        count *= 2
    return min(count, len(tokens))


def join_parts(parts: Sequence[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> Response:
    """Concatenate the parts of a response; each part starts where the previous one ended."""
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
        {name: _join_rows(name, parts, declared) for name in last.extras},
        last.metrics,
    )


def first_tokens(response: Response, count: int, declared: Sequence[Field]) -> Response:
    """Truncate ``response`` to its first ``count`` tokens and set its finish reason to ``stop``."""
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


def _join_rows(name: str, parts: Sequence[Response], declared: Sequence[Field]) -> Any:
    """Concatenate the rows of a field. Rows aligned to the response are appended; if several parts report the same row of another
    field, the earliest part wins."""
    aligned = next((spec.align for spec in declared if spec.name == name), "response")
    merged = parts[0].extras[name]
    for part in parts[1:]:
        more = part.extras[name] if aligned == "response" else part.extras[name][len(merged) :]
        merged = [*merged, *more] if isinstance(merged, list) else np.concatenate([merged, more])
    return merged


def partial_rollout(config: Config) -> bool:
    """Return ``--partial-rollout``. The default is True with ``--schedule async``, which would otherwise wait for the longest
    response before every weight push and be no faster than ``ahead``; with other schedules it is False."""
    chosen = config.rollout.partial_rollout
    return config.run.schedule == "async" if chosen is None else chosen
