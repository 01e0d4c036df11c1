"""Sums of a step's metrics over its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_core.data.means import add


def add_pairs(totals: dict[str, tuple[Tensor, Tensor]], pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Add the (sum, weight) pairs of one micro-batch to those of the step, in float64."""
    add(totals, {name: (_double(total), _double(weight)) for name, (total, weight) in pairs.items()})


def _double(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()
