"""Means as (sum, weight) pairs: what can still be added over micro-batches, steps and ranks, and is divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def add(into: dict[str, tuple[T, T]], more: Mapping[str, tuple[T, T]]) -> None:
    """Add ``more`` to the pairs of ``into``, name by name; sums and weights are floats, or tensors of one element."""
    pairs: dict[str, tuple[Any, Any]] = into
    for name, (total, weight) in more.items():
        old = pairs.get(name, (0.0, 0.0))
        pairs[name] = (old[0] + total, old[1] + weight)


def as_floats(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Pairs of tensors as plain floats, which waits for the device that holds them."""
    return {name: (float(total), float(weight)) for name, (total, weight) in pairs.items()}


def means(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """name -> sum / weight; a quantity of weight 0 was not measured and has no entry."""
    return {name: total / weight for name, (total, weight) in pairs.items() if weight}
