"""Weights that hold NaN or Inf are refused when they are quantised, or with the stream they are in."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.errors import MilesError

#: How many weights are looked at together.
TOGETHER = 16


class Finite:
    """Refuses what is not finite.

    A look waits for the GPU that holds a weight, which has nothing to do meanwhile: so those of one GPU that stay where they are are
    looked at together. Who is done calls ``look``.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Tensor]] = []
        self._ends: list[Tensor] = []

    def add(self, name: str, weight: Tensor, stays: bool = False, shows: Tensor | None = None) -> None:
        """The next weight, which ``stays`` as it is until all were looked at. What is not finite ``shows`` in a smaller tensor, if there is one.

        Raises:
            MilesError: it, or one of those before it, holds NaN or Inf.
        """
        if not weight.numel():
            return
        if self._waiting and self._waiting[0][1].device != weight.device:
            self.look()
        self._waiting.append((name, weight))
        self._ends += torch.aminmax(
            weight if shows is None else shows
        )  # one pass without a mask in memory; NaN comes through
        if not stays or not weight.is_cuda or len(self._waiting) == TOGETHER:
            self.look()

    def look(self) -> None:
        """Raises MilesError where one of the weights that wait is not finite."""
        waiting, ends = self._waiting, self._ends
        self._waiting, self._ends = [], []
        if not waiting:
            return
        finite = torch.stack(ends).isfinite().tolist()
        for (name, weight), low, high in zip(waiting, finite[::2], finite[1::2], strict=True):
            if not low or not high:
                _refuse(name, weight)


def _refuse(name: str, weight: Tensor) -> None:
    bad = ~weight.isfinite()
    first = bad.nonzero()[0].tolist()
    raise MilesError(
        f"{name} holds {int(bad.sum())} values that are NaN or Inf, the first ({weight[tuple(first)].item()}) at "
        f"{first}; it cannot be quantised. The weights went wrong in training or in the checkpoint: look at the last "
        "gradient norms, or resume from an earlier step with a lower --lr"
    )
