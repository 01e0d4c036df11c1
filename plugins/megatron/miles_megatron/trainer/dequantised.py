"""Dequantises TransformerEngine's FP8 blocks of 128 to BF16 in two passes over the tensor.

TransformerEngine's implementation makes four passes in FP32, and the backward pass dequantises the weights and inputs of every linear layer
in every micro-batch. E4M3 codes are exact in BF16, and the product with the FP32 scale is rounded once, when it is stored. The result is
therefore bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_BLOCK = 128


def dequantise_in_two_passes(cast: Any) -> None:
    """Replace ``forward`` of TransformerEngine's ``_FromFloat8BlockwiseFunc`` or a class with its interface; safe to call twice."""
    if not hasattr(cast.forward, "__wrapped__"):
        cast.forward = staticmethod(_quick(cast.forward))


def _quick(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype | None = None) -> Tensor:
        codes = tensor._rowwise_data
        if codes is None or not codes.numel() or (dtype or tensor._dtype) != torch.bfloat16:
            return original(ctx, tensor, dtype)
        columns = codes.shape[-1]
        rows = codes.numel() // columns
        if columns % _BLOCK or (tensor._is_2D_scaled and rows % _BLOCK):
            return original(ctx, tensor, dtype)
        scales, across = tensor._rowwise_scale_inv, columns // _BLOCK  # the scales may be padded
        shape: tuple[int, ...]
        if tensor._is_2D_scaled:
            shape, scales = (rows // _BLOCK, _BLOCK, across, _BLOCK), scales[:, None, :across, None]
        else:
            shape, scales = (rows, across, _BLOCK), scales[:, :rows].t().unsqueeze(2)
        found = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
        torch.mul(codes.view(torch.float8_e4m3fn).to(torch.bfloat16).view(shape), scales, out=found.view(shape))
        return found

    return forward
