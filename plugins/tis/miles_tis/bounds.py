"""Computes and checks the bounds of importance weights."""

from __future__ import annotations

import math

from miles_core.plugin import ConfigError
from miles_tis.config import TisConfig


def bounds(options: TisConfig) -> tuple[float, float]:
    """Return the (lower, upper) bound of a weight; the lower bound is 0 if the mode only truncates.

    Raises:
        ConfigError: lower <= 1 <= upper does not hold.
    """
    low, high = options.clip_low, options.clip
    if options.threshold is not None:
        threshold = options.threshold
        if not threshold > 0:
            raise ConfigError(f"--tis-threshold {threshold:g} must be greater than 0; 2 bounds weights to [0.5, 2]")
        low, high = min(threshold, 1 / threshold), max(threshold, 1 / threshold)
    _check(low, high, "--tis-clip-low", "--tis-clip")
    return (0.0 if options.mode == "truncate" else low), high


def rejection_bounds(options: TisConfig) -> tuple[float, float]:
    """Return the (lower, upper) bounds of ``--tis-reject``; 0 and infinity by default.

    Raises:
        ConfigError: ``--tis-reject`` without bounds, or lower <= 1 <= upper does not hold.
    """
    given = options.reject_low is not None or options.reject_high is not None
    if options.reject != "none" and not given:
        raise ConfigError(
            f"--tis-reject {options.reject} has no bounds; give --tis-reject-low (<= 1), --tis-reject-high (>= 1) or both"
        )
    low = 0.0 if options.reject_low is None else options.reject_low
    high = math.inf if options.reject_high is None else options.reject_high
    _check(low, high, "--tis-reject-low", "--tis-reject-high")
    return low, high


def _check(low: float, high: float, low_flag: str, high_flag: str) -> None:
    if not low <= 1.0 <= high:
        raise ConfigError(
            f"the bounds [{low:g}, {high:g}] do not contain 1 ({low_flag}, {high_flag}): they would re-weight on-policy data; give "
            "a lower bound <= 1 and an upper bound >= 1"
        )
