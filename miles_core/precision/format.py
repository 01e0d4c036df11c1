"""The contract of a number format.

One object per format serves the trainer's forward, the weight export, the engine and the checkpoint converter, so that all of them
hold the same bytes. A format describes how one weight matrix is stored; core derives everything else from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Format(ABC):
    """How weights are stored in one number format.

    Attributes:
        name: as in ``--rollout-precision``.
        tile: (rows, columns) of the block that shares one scale; a row is one output feature, columns run along K.
    """

    name: str
    tile: tuple[int, int]

    @abstractmethod
    def refuse(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why this tensor cannot be stored in this format, as a sentence with name, shape and what would fit; else None."""

    @abstractmethod
    def quantize(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """weight [N, K] of the model copy -> stored name -> tensor. ``name`` is the checkpoint name ``X.weight``.

        Raises MilesError naming the tensor when it holds NaN or Inf."""

    @abstractmethod
    def dequantize(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        """Inverse of ``quantize``: [N, K] float32, exactly what the codes mean."""

    @abstractmethod
    def config(self, unquantized: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` block of config.json."""
