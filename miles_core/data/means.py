"""Means as (sum, weight) pairs, which can be added over micro-batches, steps and ranks before a single division at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def add(into: dict[str, tuple[T, T]], more: Mapping[str, tuple[T, T]]) -> None:
    """Add the pairs of ``more`` to those of ``into`` by name; sums and weights are floats or one-element tensors."""
    pairs: dict[str, tuple[Any, Any]] = into
    for name, (total, weight) in more.items():
        old = pairs.get(name, (0.0, 0.0))
        pairs[name] = (old[0] + total, old[1] + weight)


def as_floats(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Convert (sum, weight) tensors to Python floats. Synchronises with the device."""
    return {name: (float(total), float(weight)) for name, (total, weight) in pairs.items()}


def means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return name -> sum / weight, without entries of weight 0 (not measured)."""
    return {name: total / weight for name, (total, weight) in pairs.items() if weight}
