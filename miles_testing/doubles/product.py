"""A native product that runs on any device, for tests of the code around native products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product

#: Sizes of a tiny model whose layers and experts these products take.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 2,
}


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


class ExactExperts(ExactProduct):
    """Multiplies several layers, and experts, at once.

    Attributes:
        tile: rows of a weight must be a multiple of it to be joined with others.
        factor: of the results of experts, so that they can differ from emulated ones.
        experts_calls: number of calls of ``experts``.
    """

    tile = 128
    factor = 1.0
    experts_calls = 0

    def joins(self, shapes: Sequence[tuple[int, int]]) -> bool:
        return all(n % self.tile == 0 for n, _ in shapes)

    def takes_experts(self, gate_up: tuple[int, int], down: tuple[int, int]) -> bool:
        return True

    def experts(
        self, x: Tensor, row: Tensor, ends: Tensor, gate_up: Mapping[str, Tensor], down: Mapping[str, Tensor]
    ) -> Tensor:
        self.experts_calls += 1
        expert = torch.searchsorted(ends, torch.arange(len(row), dtype=torch.int32), right=True)
        up, below = (
            torch.stack(
                [self.format.dequantize({name: part[i] for name, part in each.items()}) for i in range(len(ends))]
            )
            for each in (gate_up, down)
        )
        rows = self.format.fake_quantize_activation(x.float())[row]
        gate, value = torch.einsum("pk,pnk->pn", rows, up[expert]).chunk(2, -1)
        inner = self.format.fake_quantize_activation(torch.nn.functional.silu(gate) * value)
        return (self.factor * torch.einsum("pk,pnk->pn", inner, below[expert])).to(self.dtype)
