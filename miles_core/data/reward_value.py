"""Extracts the scalar reward of a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from miles_core.errors import DataError

#: Largest absolute reward: rewards are squared and summed (standard deviations, returns) in float64 and stored in float32.
LARGEST = 1e30


def number(reward: Any, reward_key: str | None) -> float:
    """Convert ``reward`` to a finite float. It may be a number (including bool, numpy and 0-d tensors), or a dict with the entry
    ``reward_key``.

    Raises:
        DataError: not a number, NaN or infinite, or a dict without ``reward_key``. The message is a predicate ("is nan; ..."); the
            caller prepends the subject.
    """
    value = reward
    if isinstance(reward, Mapping):
        if reward_key is None:
            raise DataError(f"is a dict with keys {_keys(reward)}; name the one to train on with --reward-key")
        if reward_key not in reward:
            raise DataError(f"is a dict without --reward-key {reward_key!r}; it has {_keys(reward)}")
        value = reward[reward_key]
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise DataError(f"is {reward!r}, which is more than one number") from error
    if not isinstance(value, Real):
        raise DataError(f"is {reward!r} ({type(value).__name__}); a reward must be a number")
    try:
        found = float(value)
    except OverflowError as error:
        raise DataError("is an integer with hundreds of digits; a reward must be a finite number") from error
    if not math.isfinite(found):
        raise DataError(f"is {reward!r}; a reward must be finite")
    if abs(found) > LARGEST:
        raise DataError(
            f"is {reward!r}; a reward must be between -{LARGEST:g} and {LARGEST:g}, or its square is infinite"
        )
    return found


def reward_value(sample: Any, reward_key: str | None = None) -> float:
    """Return the scalar reward of ``sample``: its ``reward``, or ``reward[reward_key]`` if that is a dict.

    Raises:
        DataError: the sample has no usable reward; names the sample.
    """
    try:
        return number(sample.reward, reward_key)
    except DataError as error:
        raise DataError(f"the reward of sample {getattr(sample, 'index', None)} {error}") from error


def _keys(reward: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in reward) or "none"
