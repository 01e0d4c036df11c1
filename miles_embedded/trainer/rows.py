"""Rows of a packed micro-batch in padded slots: which segments are padded to one length, and the moves between rows and slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_embedded.trainer.packing import Ints

#: The shortest segment of a bucket has at least this fraction of its longest (or differs by at most _SLACK rows).
_FILL = 0.75
_SLACK = 16


def group_similar(lengths: Ints) -> list[Ints]:
    """Group indices by similar length, longest first; indices stay ascending within a group."""
    order = np.argsort(-lengths, kind="stable")
    found: list[Ints] = []
    while len(order):
        longest = lengths[order[0]]
        same = lengths[order] >= min(_FILL * longest, longest - _SLACK)
        found.append(np.sort(order[same]))
        order = order[~same]
    return found


class Spread(torch.autograd.Function):
    """Gather rows into slots: [rows, ...] -> [slots, ...]. Every row has one slot, so the backward pass is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, inverse: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None, None


class Collect(torch.autograd.Function):
    """Gather slots into rows: [slots, ...] -> [rows, ...]. Padding slots receive no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, inverse: Tensor, pads: Tensor) -> Tensor:
        ctx.save_for_backward(slots, pads)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slots, pads = ctx.saved_tensors
        grad = grads[0].index_select(0, slots)
        if len(pads):
            grad.index_fill_(0, pads, 0.0)
        return grad, None, None, None
