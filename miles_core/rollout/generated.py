"""What a custom generate function hands over: a sample it made, and the sampling parameters it asks with.

Both come from somebody's code, so each value is looked at before anything computes with it.
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


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


#: entry of the sampling parameters -> (what it must be, the test); ranges are the engine's to say.
_PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("a whole number", _whole),
    "temperature": ("a number", _number),
    "top_p": ("a number", _number),
    "top_k": ("a whole number", _whole),
    "stop": ("texts of at least one character", lambda v: all(isinstance(x, str) and x for x in v)),
    "stop_token_ids": ("token ids", lambda v: all(map(_whole, v))),
    "ignore_eos": ("True or False", lambda v: isinstance(v, bool)),
}


def sampling_of(params: Any, usual: Sampling) -> Sampling:
    """``usual`` with what ``params`` says otherwise: a mapping of some of its entries, or a ``Sampling``.

    Raises:
        DataError: an entry that does not exist, or of a type that it cannot be.
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
        wanted, right = _PARAMETERS[name]
        if isinstance(getattr(usual, name), tuple) != isinstance(value, tuple) or not right(value):
            raise DataError(f"sampling_params: {name} is {params[name]!r}, and must be {wanted}")
    return dataclasses.replace(usual, **values)


def check_samples(made: Any, number: int, where: str, vocabulary: int) -> list[Sample]:
    """The samples that a function returned for sample ``number``.

    Args:
        made: a sample or a list of them.
        number: of the sample that it was called with.
        where: the function, for messages.
        vocabulary: how many token ids the model knows.

    Raises:
        DataError: it is something else, or a sample holds what it cannot.
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
                f"{where} returned for sample {number} the Sample that it returned for sample {one.rollout_id} before; return the one "
                "that it is given, or copies of that (copy.deepcopy)"
            )
        if wrong := _wrong(one, vocabulary):
            raise DataError(f"{where}: sample {one.index} has {wrong}")
    return samples


def _wrong(sample: Sample, vocabulary: int) -> str:
    """What a sample holds and cannot, in words; empty where all is right. A status given as text becomes a ``Status``."""
    tokens, length, mask, log_probs = sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs
    if not isinstance(tokens, list):
        return f"tokens of type {type(tokens).__name__}; give a list of token ids"
    strange = [t for t in tokens if not _whole(t) or not 0 <= t < vocabulary]
    if strange:
        return f"the token {strange[0]!r}; token ids are 0 to {vocabulary - 1}"
    if not _whole(length) or not 0 <= length <= len(tokens):
        return f"a response_length of {length!r}; it is the number of its last tokens that are the response, of {len(tokens)}"
    if mask is not None and not (isinstance(mask, list) and all(m in (0, 1) for m in mask)):
        return f"a loss_mask of {mask!r:.80}; it is None, or a list with 0 or 1 for each token of the response"
    if log_probs is not None and not (isinstance(log_probs, list) and all(map(_number, log_probs))):
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
