"""The trainer's quantisers: TransformerEngine's kernels on a GPU, for formats that also quantise activations, otherwise the format itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from miles_formats import VALUES, Format, FormatItself, Parity, Quantizer, bounded
from miles_megatron.recipes import TILES


def make_quantizer(format: Format) -> Quantizer | None:
    """Return the trainer's quantiser on this machine; None for a format that it does not support."""
    if format.name not in TILES:
        return None
    inside = torch.cuda.is_available() and format.quantizes_activations
    return _KERNELS[format.name](format) if inside else FormatItself(format)


class TransformerEngineCodes(Quantizer):
    """Quantises with TransformerEngine's kernels, for formats with a recipe."""

    def __init__(self, format: Format) -> None:
        self._tile = format.tile

    def weight(self, weight: Tensor) -> dict[str, Tensor]:
        """See ``Quantizer.weight``."""
        rows, columns = (-(-size // tile) for size, tile in zip(weight.shape, self._tile, strict=True))
        found = self._quantize(weight, weights=True)
        codes = found._rowwise_data.view(torch.float8_e4m3fn)[: weight.shape[0], : weight.shape[1]]
        scales = found._rowwise_scale_inv[:rows, :columns]
        return {"weight": codes.to(weight.device), "weight_scale_inv": scales.to(weight.device)}

    def activation(self, x: Tensor) -> Tensor:
        """See ``Quantizer.activation``."""
        return self._quantize(x, weights=False).dequantize(dtype=torch.float32).to(x)

    def _quantize(self, x: Tensor, weights: bool) -> Any:
        return self._quantizer(weights)(x.cuda().bfloat16().contiguous())

    @abstractmethod
    def _quantizer(self, weights: bool) -> Any:
        """Return TransformerEngine's quantizer for weights or for activations."""


class Blocks(TransformerEngineCodes):
    """Quantises blocks of 128 x 128 weights and 1 x 128 activations.

    TransformerEngine multiplies by the reciprocal of the scale in places, which changes a few codes in ten thousand by one step. On an H200
    the probes differed by 4.6e-3 (weights) and 2.2e-3 (activations); the format's own rounding error is 2.7e-2.
    """

    weights: Parity = bounded(8e-3)
    activations: Parity = bounded(8e-3)

    def _quantizer(self, weights: bool) -> Any:
        from transformer_engine.common.recipe import Float8BlockScaling
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        recipe = Float8BlockScaling()
        chosen = recipe.fp8_quant_fwd_weight if weights else recipe.fp8_quant_fwd_inp
        return Float8BlockQuantizer(
            DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=chosen.amax_epsilon,
            force_pow_2_scales=chosen.power_2_scale,
            block_scaling_dim=2 if weights else 1,
        )


class Microscaling(TransformerEngineCodes):
    """Quantises blocks of 1 x 32 with power-of-two scales; needs Blackwell or later."""

    weights: Parity = VALUES
    activations: Parity = VALUES

    def _quantizer(self, weights: bool) -> Any:
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        return MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)


#: Number format -> quantizer with TransformerEngine's kernels; same keys as ``RECIPES``.
_KERNELS: dict[str, type[TransformerEngineCodes]] = {"fp8": Blocks, "mxfp8": Microscaling}
