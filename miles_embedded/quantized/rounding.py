"""Rounds the input of a quantised layer, with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Rounding:
    """Rounds with ``round`` while ``enabled``.

    Args:
        round: a format's rounding of x [..., K].
        codes_only: free the values of weights whose codes arrived (``quantized.freed``).
        rounds_gradients: the product that computes the gradient of a linear layer's input quantises the gradient of its output, too.

    Attributes:
        native: whether layers with a native product use it.
    """

    def __init__(
        self, round: Callable[[Tensor], Tensor], codes_only: bool = False, rounds_gradients: bool = False
    ) -> None:
        self.round, self.codes_only, self.rounds_gradients = round, codes_only, rounds_gradients
        self.enabled = self.native = True

    def __call__(self, x: Tensor) -> Tensor:
        """Round x [..., K]; returns x itself while disabled."""
        if not self.enabled:
            return x
        rounded: Tensor = _StraightThrough.apply(x, self.round)
        return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, round: Callable[[Tensor], Tensor]) -> Tensor:
        return round(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0], None
