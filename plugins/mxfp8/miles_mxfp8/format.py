"""MXFP8: one byte per weight, and one power of two per 32 weights.

The elements are those of block-wise FP8: E4M3, with a sign, four exponent and three mantissa bits, up to 448. The scale differs. It applies
to 32 neighbours of one row instead of 128 x 128 weights, so an outlier affects 31 other weights instead of 16,383. It is an exponent in one
byte (UE8M0: 2^(byte - 127), 255 is NaN), so applying it never rounds and a Blackwell tensor core can apply it inside the GEMM. This is the
MX layout of the Open Compute Project (Microscaling Formats v1.0).

The MX specification rounds the exponent of the largest magnitude down, which saturates block maxima of up to 1.14 times 448. Training
implementations round up instead, as Transformer Engine and the GPU's conversion instruction do:

    e    = the smallest integer with 2^e >= amax / 448
    byte = clamp(e + 127, 0, 254)
    code = E4M3(clamp(x / 2^(byte - 127), +-448))   to nearest, ties to even

No division and no logarithm is needed for e: 448 is 0.875 * 2^9, so with amax = m * 2^E (frexp, m in [0.5, 1)) it is
E - 9 where m <= 0.875 and E - 8 elsewhere, exactly, down to the smallest denormal. A block of zeros has byte 0 and
codes 0.

Relative RMS error on N(0, 1): 0.0266, at 8.25 bits per weight. Quantising dequantised values again gives the same values, which are exact in
BF16. The codes may differ: a block maximum that rounded down to 224 gets the next smaller exponent and twice the code. Activations are
quantised by the same rule, 1 x 32 along K. The backward pass of a GEMM would need blocks along the other dimension, that is, another
quantisation of the same tensor; here it stays in full precision. BF16's largest magnitudes may be rounded up to 2^128, which is Inf in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from miles_formats import Config, Format, Parts, Stored, allocate_output, convert_for_kernel, runs_kernels, store
from miles_mxfp8.layout import BLOCK, CODES, E4M3, SCALES
from miles_mxfp8.product import Mxfp8Product

E4M3_MAX = 448.0
BIAS = 127
NOT_A_NUMBER = 255
KERNEL_CAPABILITY = (8, 9)  # the first GPUs that convert to E4M3


class Mxfp8(Format):
    """MXFP8: E4M3 codes in blocks of 32 along K, each with a power of two as its scale.

    Stored as ``X.weight`` float8_e4m3fn [N, K] and ``X.weight_scale_inv`` uint8 [N, K/32] (exponent + 127, row major),
    with w = code * 2^(scale - 127).

    Args:
        skip: selectors of weights to leave unquantised.
    """

    name = "mxfp8"
    tile = (1, BLOCK)
    exact = False
    error = 0.03
    skip_origin = "--fp8-skip-layers"

    def __init__(self, skip: tuple[str, ...] = ()) -> None:
        self.skip = skip

    @classmethod
    def from_config(cls, config: Config) -> Mxfp8:
        return cls(config.plugin("mxfp8").skip_layers)

    def refuse(self, shape: tuple[int, int]) -> str | None:
        columns = shape[1]
        if columns % BLOCK == 0:
            return None
        below = columns // BLOCK * BLOCK
        near = f"{below} or {below + BLOCK}" if below else f"{BLOCK}"
        return (
            f"{BLOCK} weights of a row share a scale, so K must be a multiple of {BLOCK}: {near}, not {columns}; "
            f"leave it in bf16 with {self.skip_origin}"
        )

    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        rows, columns = shape
        return (
            Stored(CODES, E4M3, (rows, columns)),
            Stored(SCALES, torch.uint8, (rows, columns // BLOCK)),
        )

    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        if runs_kernels(weight, KERNEL_CAPABILITY):
            from miles_mxfp8 import kernels  # needs Triton

            parts = allocate_output(self, (weight.shape[0], weight.shape[1]), weight.device, out)
            kernels.quantize(convert_for_kernel(weight), parts[CODES], parts[SCALES])
            return store(parts, out)
        blocks = in_blocks(weight.float())
        scale = scale_byte(blocks.abs().amax(-1))
        codes = torch.div(blocks, power(scale)[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return store({CODES: codes.reshape(weight.shape), SCALES: scale}, out)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes, scale = parts[CODES], parts[SCALES]
        if runs_kernels(codes, KERNEL_CAPABILITY):
            from miles_mxfp8 import kernels  # needs Triton

            return kernels.dequantize(codes.contiguous(), scale.contiguous())
        return (in_blocks(codes.float()) * power(scale)[..., None]).reshape(codes.shape)

    def fake_quantize_activation(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if runs_kernels(rows, KERNEL_CAPABILITY):
            from miles_mxfp8 import kernels  # needs Triton

            return kernels.fake_quantize(convert_for_kernel(rows)).reshape(x.shape).to(x.dtype)
        return self.dequantize(self.quantize(rows)).reshape(x.shape).to(x.dtype)

    def product(self, device: torch.device, dtype: torch.dtype) -> Mxfp8Product:
        """See ``miles_mxfp8.product``."""
        return Mxfp8Product(device, dtype)

    def config(self, unquantized: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "mxfp8",
            "fmt": "e4m3",
            "weight_block_size": [1, BLOCK],
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(unquantized),
        }


def in_blocks(matrix: Tensor) -> Tensor:
    """Reshape [N, K] to [N, K/32, 32]; K must be a multiple of 32."""
    return matrix.reshape(matrix.shape[0], matrix.shape[1] // BLOCK, BLOCK)


def scale_byte(amax: Tensor) -> Tensor:
    """Return the uint8 scale for each block's largest magnitude (FP32 >= 0); 255 (NaN) if amax is not finite."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1) or 0
    up = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    byte = (up + BIAS).clamp_(0, 254)
    return torch.where(amax > 0, byte, 0).masked_fill_(~amax.isfinite(), NOT_A_NUMBER).to(torch.uint8)


def power(byte: Tensor) -> Tensor:
    """Return the FP32 power of two of a scale byte; NaN for 255."""
    bits = byte.to(torch.int32) << 23  # the exponent field of an FP32 number
    bits = bits.masked_fill_(byte == 0, 1 << 22)  # 2^-127 is a denormal
    return bits.masked_fill_(byte == NOT_A_NUMBER, 0x7FC00000).view(torch.float32)
