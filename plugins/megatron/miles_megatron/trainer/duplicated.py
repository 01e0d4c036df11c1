"""A linear layer that every tensor-parallel rank has in full; replaces TransformerEngine's where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class DuplicatedLinear(nn.Module):
    """Megatron-Core's projections before and after experts of another width (``moe_latent_size``), without biases.

    Args:
        inputs, outputs: sizes.
        config: Megatron-Core's configuration.
        fixed: arguments of TransformerEngine's layer that always have the same value, and those of its initialisation.
    """

    def __init__(self, inputs: int, outputs: int, config: Any, **fixed: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Megatron-Core then sums its gradient over the ranks, because each rank has only a part of the tokens
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return ([..., outputs], None for the bias). x: [..., inputs]."""
        return linear(x, self.weight), None
