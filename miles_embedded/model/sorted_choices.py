"""Choices of experts, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_embedded.kernels.available import kernels_run


@dataclass
class SortedChoices:
    """The assignment of rows to experts, sorted by expert.

    Attributes:
        order: [rows * k] flat (row, choice) index of each sorted position.
        place: [rows, k] sorted position of each choice.
        row: [rows * k] row of each sorted position.
        ends: [experts] int32, end of each expert's positions.
        counts: positions per expert; None where a grouped product needs only ``ends``, which avoids synchronising with a GPU.
    """

    order: Tensor
    place: Tensor
    row: Tensor
    ends: Tensor
    counts: list[int] | None


def sort_choices(index: Tensor, experts: int, counted: bool = True) -> SortedChoices:
    """Sort expert choices ``index`` [rows, k] by expert, stable in the row order. ``counted``: fill ``SortedChoices.counts``."""
    if index.is_cuda and not counted and kernels_run(index.device):
        from miles_embedded.kernels.experts import MOST_CHOICES, sorted_places

        if 0 < index.numel() <= MOST_CHOICES:
            return SortedChoices(*sorted_places(index, experts), counts=None)
    if index.device.type == "cpu":
        return _sort_with_numpy(index, experts, counted)
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    # bincount would synchronise, to find the largest value
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return SortedChoices(
        order,
        place.view_as(index),
        torch.div(order, index.shape[1], rounding_mode="floor"),
        counts.cumsum(0, dtype=torch.int32),
        counts.tolist() if counted else None,
    )


def _sort_with_numpy(index: Tensor, experts: int, counted: bool) -> SortedChoices:
    """Sort on a CPU. NumPy sorts integers of 8 and 16 bits by radix, which takes a quarter of the time of torch's sort of 64 bits."""
    flat = index.numpy().reshape(-1)
    order = np.argsort(flat.astype(np.min_scalar_type(experts)), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.bincount(flat, minlength=experts)
    return SortedChoices(
        torch.from_numpy(order),
        torch.from_numpy(place).view_as(index),
        torch.from_numpy(order // index.shape[1]),
        torch.from_numpy(counts.cumsum(dtype=np.int32)),
        counts.tolist() if counted else None,
    )
