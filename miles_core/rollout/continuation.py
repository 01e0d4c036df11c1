"""Going on from what an engine returned before it was done.

An aborted response is part of a sample: its tokens, log-probabilities and recorded rows stay, and the next request goes on
behind them with the same key. Sampling keyed on (seed, key, position) then gives the tokens of a response that was never
aborted, as long as the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.field import Field
from miles_core.data.sample import rows

Decode = Callable[[list[int]], str]


def usable(response: Response, request: Request, declared: Sequence[Field], decode: Decode) -> Response | None:
    """The part of an aborted response that a further request can go on from; None when that is nothing.

    A response without a field that was asked for is of no use: its rows could only be made up. Tokens at the end whose text may
    begin a stop string are left to the next request, which sees the whole string.
    """
    if request.extras - response.extras.keys():
        return None
    count = _before_a_stop(response.tokens, request.sampling.stop, decode)
    if not count:
        return None
    length = len(request.tokens) + count
    specs = {spec.name: spec for spec in declared}
    extras = {n: v[: rows(specs[n], length, count)] if n in specs else v for n, v in response.extras.items()}
    return Response(
        response.tokens[:count],
        response.log_probs[:count],
        "abort",
        decode(response.tokens[:count]),
        [(index, version) for index, version in response.weight_versions if index < count],
        extras,
        response.metrics,
    )


def joined(parts: Sequence[Response], declared: Sequence[Field], decode: Decode) -> Response:
    """The parts of one response as the one that it would have been; each part began where the one before it ended."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    tokens = [token for part in parts for token in part.tokens]
    versions: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        versions += [(start + i, v) for i, v in part.weight_versions if not versions or versions[-1][1] != v]
        start += len(part.tokens)
    before = tokens[: len(tokens) - len(last.tokens)]
    ended_by_text = last.finish == "stop" and last.text != decode(last.tokens)
    return Response(
        tokens,
        [value for part in parts for value in part.log_probs],
        last.finish,
        decode(before) + last.text if ended_by_text else decode(tokens),
        versions,
        {name: _rows_of(name, parts, declared) for name in last.extras},
        last.metrics,
    )


def _rows_of(name: str, parts: Sequence[Response], declared: Sequence[Field]) -> Any:
    """A field's rows: response rows follow each other; of rows that several parts report, the earliest stays in force."""
    aligned = next((spec.align for spec in declared if spec.name == name), "response")
    found = parts[0].extras[name]
    for part in parts[1:]:
        more = part.extras[name] if aligned == "response" else part.extras[name][len(found) :]
        found = [*found, *more] if isinstance(found, list) else np.concatenate([found, more])
    return found


def _before_a_stop(tokens: list[int], stop: Sequence[str], decode: Decode) -> int:
    """How many tokens can be kept: up to where the text could be the beginning of a stop string, or ends inside a
    character."""
    count = len(tokens)
    while stop and count:
        text = decode(tokens[:count])
        begun = any(text.endswith(s[:length]) for s in stop for length in range(1, len(s)))
        if not begun and not text.endswith("\ufffd"):
            break
        count -= 1
    return count
