"""Continues responses that an engine aborted before they were complete, and validates what a custom generate function provides.

The tokens, log-probabilities and recorded rows of an aborted response are kept, and the next request continues after them
with the same key. Because sampling is keyed on (seed, key, position), the result equals that of an uninterrupted response,
as long as the weights are the same.

Samples and sampling parameters of a custom function come from user code, so every value is checked before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.data.column import FLOATS, Column, join_columns
from miles_core.data.field import Field
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError

if TYPE_CHECKING:
    from miles_core.config.config import Config


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


#: sampling parameter -> (description of the valid type, predicate). Engines check the ranges.
_PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("a whole number", _is_whole),
    "temperature": ("a number", _is_number),
    "top_p": ("a number", _is_number),
    "top_k": ("a whole number", _is_whole),
    "stop": ("texts of at least one character", lambda v: all(isinstance(x, str) and x for x in v)),
    "stop_token_ids": ("token ids", lambda v: all(map(_is_whole, v))),
    "ignore_eos": ("True or False", lambda v: isinstance(v, bool)),
}


def merge_sampling(params: Any, usual: Sampling) -> Sampling:
    """Return ``usual`` with the entries of ``params`` replaced. ``params`` is a mapping, a ``Sampling`` or None.

    Raises:
        DataError: an entry does not exist or has the wrong type.
    """
    if params is None:
        return usual
    if isinstance(params, Sampling):
        params = dataclasses.asdict(params)
    if not isinstance(params, Mapping):
        raise DataError(f"sampling_params must be a mapping, got {type(params).__name__}")
    unknown = next((key for key in params if key not in _PARAMETERS), None)
    if unknown is not None:
        raise DataError(f"sampling_params has no {unknown!r}; it takes {', '.join(sorted(_PARAMETERS))}")
    values: dict[str, Any] = {k: (v,) if k == "stop" and isinstance(v, str) else v for k, v in params.items()}
    for name in ("stop", "stop_token_ids"):
        if isinstance(values.get(name), Sequence):
            values[name] = tuple(values[name])
    for name, value in values.items():
        wanted, is_valid = _PARAMETERS[name]
        if isinstance(getattr(usual, name), tuple) != isinstance(value, tuple) or not is_valid(value):
            raise DataError(f"sampling_params: {name} is {params[name]!r}, and must be {wanted}")
    return dataclasses.replace(usual, **values)


def check_samples(made: Any, number: int, where: str, vocabulary: int) -> list[Sample]:
    """Validate what a generate function returned and convert it to a list of samples.

    Args:
        made: the returned value: a sample or a list of samples.
        number: number of the sample that the function was called with.
        where: description of the function, for messages.
        vocabulary: vocabulary size; token ids must be smaller.

    Raises:
        DataError: the value is not a sample or list of samples, or a sample holds an invalid value.
    """
    samples = made if isinstance(made, list) else [made]
    if not samples or not all(isinstance(s, Sample) for s in samples):
        raise DataError(
            f"{where} returned {type(made).__name__} for sample {number}; return a Sample or a list of them"
        )
    if len({id(s) for s in samples}) < len(samples):
        raise DataError(
            f"{where} returned one Sample twice for sample {number}; return a copy (copy.deepcopy) for each"
        )
    for one in samples:
        if one.rollout_id not in (None, number):
            raise DataError(
                f"{where} returned for sample {number} the same Sample object as for sample {one.rollout_id}; return the Sample that "
                "it was called with, or copies of it (copy.deepcopy)"
            )
        if fault := find_fault(one, vocabulary):
            raise DataError(f"{where}: sample {one.index} has {fault}")
    return samples


def find_fault(sample: Sample, vocabulary: int) -> str:
    """Describe the first invalid value of a sample; "" if all values are valid. Converts a status given as text to ``Status``."""
    tokens, length, mask, log_probs = sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs
    if not isinstance(tokens, (list, Column)):
        return f"tokens of type {type(tokens).__name__}; give a list of token ids"
    if not isinstance(tokens, Column) or (tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary):
        invalid = next(t for t in tokens if not _is_whole(t) or not 0 <= t < vocabulary)
        return f"the token {invalid!r}; token ids are 0 to {vocabulary - 1}"
    if not _is_whole(length) or not 0 <= length <= len(tokens):
        return (
            f"a response_length of {length!r}; it is the number of response tokens, at most {len(tokens)} (all tokens)"
        )
    if mask is not None and not (isinstance(mask, Column) and (not mask or 0 <= min(mask) <= max(mask) <= 1)):
        return f"a loss_mask of {mask!r:.80}; it is None, or a list with 0 or 1 for each token of the response"
    if log_probs is not None and not isinstance(log_probs, Column):
        return (
            f"rollout_log_probs of {log_probs!r:.80}; give a list with a number for each token of the response, or None"
        )
    if log_probs and not np.isfinite(found := np.asarray(log_probs)).all():
        return f"the log-probability {float(found[~np.isfinite(found)][0])!r}; give 0.0 where the loss mask is 0"
    if not isinstance(sample.response, str) or not isinstance(sample.metadata, dict):
        kinds = f"a {type(sample.response).__name__} as response and a {type(sample.metadata).__name__} as metadata"
        return f"{kinds}; they are a text and a dict"
    known = [str(status) for status in Status]
    if sample.status not in known:
        return f"the status {sample.status!r}; it is one of {', '.join(known)}"
    sample.status = Status(sample.status)
    return ""


Decode = Callable[[Sequence[int]], str]

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
    if not stop or len(parts) == 1 or not last.tokens:
        return
    before = join_columns(part.tokens for part in parts[:-1])
    reach = max(map(len, stop))
    context = before[-_token_count(before[::-1], reach, decode) :]
    for count in range(1, _token_count(last.tokens, reach, decode) + 1):
        text = decode(context + last.tokens[:count])
        if any(s in text for s in stop):
            parts[-1] = first_tokens(last, count, declared)
            return


def _token_count(tokens: Sequence[int], characters: int, decode: Decode) -> int:
    """Return how many of the first ``tokens`` are needed to decode to more than ``characters`` characters. The count grows by
    doubling, because a token may be a part of a character or a special token without text."""
    count = characters + 1
    while count < len(tokens) and len(decode(tokens[:count])) <= characters + _PARTIAL:
        count *= 2
    return min(count, len(tokens))


def join_parts(parts: Sequence[Response], stop: Sequence[str], declared: Sequence[Field], decode: Decode) -> Response:
    """Concatenate the parts of a response; each part starts where the previous one ended."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    tokens = join_columns(part.tokens for part in parts)
    text = decode(tokens)
    versions: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        versions += [(start + i, v) for i, v in part.weight_versions if not versions or versions[-1][1] != v]
        start += len(part.tokens)
    return Response(
        tokens,
        join_columns((part.log_probs for part in parts), FLOATS),
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
    field, the earliest part wins, or the last one if the field is declared ``newest``."""
    spec = next((spec for spec in declared if spec.name == name), None)
    aligned = spec.align if spec else "response"
    if aligned != "response" and spec and spec.newest:
        parts = parts[::-1]
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
