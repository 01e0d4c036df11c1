"""Comparison of stored values, exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Compares values of two runs.

    Attributes:
        relative: largest difference of two equal numbers, as a fraction of the larger one, or of 1 if both are smaller. 0: bit for bit.
    """

    relative: float = 0.0

    def find(self, a: Any, b: Any) -> int | None:
        """Return the index of the first entry in which two values differ; None if they are equal. A difference without an index (a
        missing value, another shape with equal entries) is at the end of the shorter one, or at 0."""
        if a is None or b is None or isinstance(a, str | Mapping) or isinstance(b, str | Mapping):
            return None if self._equal_plain(a, b) else 0
        one, other = _array(a), _array(b)
        if one is None or other is None:
            return None if self._equal_plain(a, b) else 0
        if not one.shape or not other.shape:
            return None if one.shape == other.shape and not self._differ(one, other).any() else 0
        count = min(len(one), len(other))
        if one.shape[1:] != other.shape[1:]:
            return 0
        different = self._differ(one[:count], other[:count]).any(axis=tuple(range(1, one.ndim)))
        if different.any():
            return int(different.argmax())
        return None if len(one) == len(other) else count

    def _equal_plain(self, a: Any, b: Any) -> bool:
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            return a.keys() == b.keys() and all(self.find(a[key], b[key]) is None for key in a)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            return len(a) == len(b) and all(self.find(x, y) is None for x, y in zip(a, b, strict=True))
        return type(a) is type(b) and bool(a == b)

    def _differ(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        same = a == b
        if a.dtype.kind == b.dtype.kind == "f":
            same |= np.isnan(a) & np.isnan(b)
            if self.relative:
                bound = self.relative * np.maximum(np.maximum(np.abs(a), np.abs(b)), 1.0)
                same |= np.abs(a - b) <= bound
        return np.asarray(~same)


def _array(value: Any) -> np.ndarray | None:
    """Convert numbers to an array; None for anything else."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (ValueError, TypeError):  # rows of different lengths
        return None
    if array.dtype.kind == "O" and array.ndim == 1 and any(entry is None for entry in array):
        try:
            array = np.asarray([np.nan if entry is None else entry for entry in array], np.float64)
        except (ValueError, TypeError):
            return None
    return array if array.dtype.kind in "biuf" else None
