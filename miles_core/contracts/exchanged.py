"""Checks of tokens, requests' and responses', between core, plugins and engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engine import Request, Response
from miles_core.data.column import FLOATS, TOKENS, Column, as_column
from miles_core.plugin.guard import describe, refuse

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

#: Largest log-probability that rounding explains.
_ROUNDING = 1e-3


def check_response(run: Run, request: Request, response: Any, vocabulary: int) -> None:
    """Check an engine's response to ``request``; ``vocabulary`` is the model's number of tokens.

    Raises:
        PluginError: the response is invalid; names the plugin that provides the engine.
    """
    if wrong := _describe_invalid_response(request, response, vocabulary):
        name = run.config.run.engine
        raise refuse(run.hooks.provider("engine", name), f"make_engine ({name})", wrong)


def _describe_invalid_response(request: Request, response: Any, vocabulary: int) -> str:
    if not isinstance(response, Response):
        return f"it returned {describe(response)}; expected a Response from Engine.generate"
    response.tokens = as_column(response.tokens, TOKENS)  # an engine may have set a list
    response.log_probs = as_column(response.log_probs, FLOATS)
    for name in ("tokens", "log_probs", "weight_versions"):
        if not isinstance(getattr(response, name), list if name == "weight_versions" else (list, Column)):
            return f"the response has {name} that are {describe(getattr(response, name))}; expected a list"
    count, most = len(response.tokens), request.sampling.max_new_tokens
    if count > most:
        return f"the response has {count} tokens; the request allows max_new_tokens {most}"
    if wrong := describe_invalid_tokens(response.tokens, vocabulary):
        return f"the response has {wrong}"
    if len(response.log_probs) != count:
        return f"the response has {count} tokens and {len(response.log_probs)} log_probs; expected one per token"
    if not isinstance(response.log_probs, Column):
        return f"the response has log_probs that are {describe(response.log_probs)}; expected a list of numbers"
    log_probs = np.asarray(response.log_probs)
    if count and not -inf < np.minimum.reduce(log_probs) <= np.maximum.reduce(log_probs) <= _ROUNDING:  # NaN included
        worst = next(p for p in response.log_probs if not (isfinite(p) and p <= _ROUNDING))
        return f"the response has the log-probability {worst}; expected finite values of at most 0"
    if response.finish not in ("stop", "length", "abort"):
        return f"the response has finish {response.finish!r}; expected stop, length or abort"
    if not count and response.finish != "abort":
        return f"the response has no tokens and finish {response.finish!r}; a finished response has at least one"
    return _check_versions(response.weight_versions, count)


def vocabulary_size(run: Run) -> int:
    """Return the number of tokens of the run's model; a very large one if it is unknown."""
    return int(run.plan.fact("model.vocab_size") or sys.maxsize)


def describe_invalid_tokens(tokens: Sequence[Any], vocabulary: int) -> str:
    """Describe tokens that are not all token ids; "" if they are."""
    if isinstance(tokens, Column):
        ids = np.asarray(tokens).view(np.uint32)  # negative numbers are large ones
        if not len(ids) or np.maximum.reduce(ids) < min(vocabulary, 1 << 31):
            return ""
    wrong = next(t for t in tokens if not isinstance(t, int) or not 0 <= t < vocabulary)
    return f"the token {wrong!r} in {describe(tokens)}; expected token ids, integers from 0 to {vocabulary - 1}"


def _check_versions(pairs: list[tuple[int, int]], count: int) -> str:
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        return f"the response has weight_versions {pairs!r:.80}; expected pairs (first token, version)"
    starts, versions = [start for start, _ in pairs], [version for _, version in pairs]
    if versions != sorted(versions) or len(set(starts)) < len(starts) or starts != sorted(starts):
        return f"the response has weight_versions {pairs}; expected (first token, version) with both in ascending order"
    if pairs and (starts[0] != 0 or starts[-1] > count):
        return f"the response has weight_versions {pairs} for {count} tokens; expected the first to begin at token 0"
    return ""
