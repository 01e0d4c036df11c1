"""Validates the samples and sampling parameters that a custom generate function provides.

Both come from user code, so every value is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from miles_core.contracts.engine import Sampling
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError


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
    if not isinstance(tokens, list):
        return f"tokens of type {type(tokens).__name__}; give a list of token ids"
    invalid = [t for t in tokens if not _is_whole(t) or not 0 <= t < vocabulary]
    if invalid:
        return f"the token {invalid[0]!r}; token ids are 0 to {vocabulary - 1}"
    if not _is_whole(length) or not 0 <= length <= len(tokens):
        return (
            f"a response_length of {length!r}; it is the number of response tokens, at most {len(tokens)} (all tokens)"
        )
    if mask is not None and not (isinstance(mask, list) and all(m in (0, 1) for m in mask)):
        return f"a loss_mask of {mask!r:.80}; it is None, or a list with 0 or 1 for each token of the response"
    if log_probs is not None and not (isinstance(log_probs, list) and all(map(_is_number, log_probs))):
        return (
            f"rollout_log_probs of {log_probs!r:.80}; give a list with a number for each token of the response, or None"
        )
    infinite = [p for p in log_probs or () if not math.isfinite(p)]
    if infinite:
        return f"the log-probability {infinite[0]!r}; give 0.0 where the loss mask is 0"
    if not isinstance(sample.response, str) or not isinstance(sample.metadata, dict):
        kinds = f"a {type(sample.response).__name__} as response and a {type(sample.metadata).__name__} as metadata"
        return f"{kinds}; they are a text and a dict"
    known = [str(status) for status in Status]
    if sample.status not in known:
        return f"the status {sample.status!r}; it is one of {', '.join(known)}"
    sample.status = Status(sample.status)
    return ""
