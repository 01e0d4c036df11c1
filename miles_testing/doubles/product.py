"""A native product that runs on any device, for tests of the code around native products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product


class ExactProduct(Product):
    """The product of the dequantised values in FP64, rounded once; ``calls`` lists the shapes of all products."""

    eps = 0.01

    def __init__(self, format: Format, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.format = format
        self.calls: list[tuple[int, int, int]] = []

    def prepare(self, parts: Mapping[str, Tensor]) -> Parts:
        return dict(parts)

    def restore(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
        return dict(parts)

    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        left = self.format.fake_quantize_activation(x.float()).double()
        right = self.format.dequantize(weight).double()
        self.calls.append((len(left), *right.shape))
        y = left @ right.T
        return (y if bias is None else y + bias.double()).to(self.dtype)
