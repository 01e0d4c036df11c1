"""NVFP4: four bits per weight, a one-byte scale per 16 weights, and one scale for the whole matrix.

An E2M1 number has a sign, two exponent bits and one mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives. With so few values a block
must be small, 16 neighbours along K, and a four-byte scale would be too large. The block scale is an E4M3 number, whose three mantissa bits
represent the block's maximum much more precisely than a power of two. Since E4M3 ends at 448, a second FP32 scale for the whole matrix maps
the largest block scale to 448 (NVIDIA, arXiv 2509.25149).

    S       = min(448 * 6 / amax, FP32 max)     1 for a matrix of zeros
    s_block = E4M3(amax_block * (S * (1/6)))    to nearest even
    code    = E2M1(x * inverse)                 to nearest, ties to even, saturating at 6
              inverse = min(1 / (s_block * (1/S)), FP32 max)
    value   = (code * s_block) * (1/S)

Each operation rounds once to FP32, in this order, as in Transformer Engine's reference; amax / 2688 instead of 1/S would differ in a quarter
of all mantissas. Ties go to the code with an even mantissa bit: .25 to 0, .75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4. A
block becomes zero if it is so small relative to the largest block that its scale rounds to 0.

The engine's kernel treats the gate and up projections of an expert as one matrix with one S, so they share the larger amax. Activations have
one S per token, not per batch, because a token's result must not depend on its neighbours. Random Hadamard transforms and stochastic
rounding, which pre-training recipes use, are not used, because engine and trainer must round equally.

Four over six (arXiv 2512.02010): there is no E2M1 number between 4 and 6, so a block with several values near its maximum has a large error.
With this option a block may map its maximum to 4 instead, with a scale 1.5 times as large; S is 256 * 6 / amax to leave room for it. Both
are tried, and 4 is used only if the sum of squared errors is strictly smaller.

Relative RMS error on N(0, 1): 0.0951 (0.0870 with four over six), at 4.5 bits per weight. Quantising FP32 ``dequantize(quantize(x))`` again
gives the same codes and block scales, except in blocks with s_block < 3 * 2^-9 (with four over six also s_block = 3 * 2^-9, which both
mappings can produce); 1/S may change by a relative 2^-22.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from miles_formats import Config, Format, Parts, Stored, allocate_output, convert_for_kernel, runs_kernels, store

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
FOUR_OVER_SIX_MAX = 256.0  # instead of 448: room for a scale 1.5 times as large
FP32_MAX = torch.finfo(torch.float32).max
BLOCK = 16
KERNEL_CAPABILITY = (8, 9)  # the first GPUs that convert to E4M3
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES, SCALES, SCALE, INPUT_SCALE = "weight", "weight_scale", "weight_scale_2", "input_scale"
EXPERTS = ("*.experts.*", "*.shared_experts.*", "*.shared_expert.*")


class Nvfp4(Format):
    """NVFP4: E2M1 codes in blocks of 16 along K with E4M3 scales, and one FP32 scale for the tensor.

    Stored as ``X.weight`` uint8 [N, K/2] (two codes a byte, the even index in the low bits), ``X.weight_scale``
    float8_e4m3fn [N, K/16], ``X.weight_scale_2`` FP32 scalar, with w = (code * scale) * scale_2, and ``X.input_scale``
    FP32 scalar, always 1, because activations are scaled dynamically.

    Args:
        four_over_six: let each block choose between 4 and 6 for its maximum.
    """

    name = "nvfp4"
    tile = (1, BLOCK)
    couple = (("gate_proj", "up_proj"), ("w1", "w3"))
    exact = False
    error = 0.1
    only = EXPERTS
    only_origin = "nvfp4 is for the matrices of experts"
    skip_origin = "the list of weights to leave alone"

    def __init__(self, four_over_six: bool = False) -> None:
        self.four_over_six = four_over_six
        self.largest_scale = FOUR_OVER_SIX_MAX if four_over_six else E4M3_MAX

    @classmethod
    def from_config(cls, config: Config) -> Nvfp4:
        return cls(config.plugin("nvfp4").four_over_six)

    @classmethod
    def recognises(cls, block: Mapping[str, Any]) -> bool:
        size = block.get("group_size", BLOCK)
        return block.get("quant_method") == "modelopt" and block.get("quant_algo") == "NVFP4" and size == BLOCK

    def refuse(self, shape: tuple[int, int]) -> str | None:
        columns = shape[1]
        if columns % BLOCK == 0:
            return None
        below = columns // BLOCK * BLOCK
        near = f"{below} or {below + BLOCK}" if below else f"{BLOCK}"
        return f"{BLOCK} weights of a row share a scale, so K must be a multiple of {BLOCK}: {near}, not {columns}"

    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        rows, columns = shape
        return (
            Stored(CODES, torch.uint8, (rows, columns // 2)),
            Stored(SCALES, E4M3, (rows, columns // BLOCK)),
            Stored(SCALE, torch.float32, ()),
            Stored(INPUT_SCALE, torch.float32, ()),
        )

    def stats(self, weight: Tensor) -> Tensor:
        """Return the matrix's largest magnitude, an FP32 scalar."""
        if runs_kernels(weight):
            from miles_nvfp4 import kernels  # needs Triton

            return kernels.largest(convert_for_kernel(weight))
        return weight.float().abs().amax() if weight.numel() else weight.new_zeros((), dtype=torch.float32)

    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        amax = self.stats(weight) if stats is None else stats
        if not self.four_over_six and runs_kernels(weight, KERNEL_CAPABILITY):
            from miles_nvfp4 import kernels  # needs Triton

            parts = allocate_output(self, (weight.shape[0], weight.shape[1]), weight.device, out)
            kernels.quantize(
                convert_for_kernel(weight),
                amax.contiguous(),
                *(parts[suffix] for suffix in (CODES, SCALES, SCALE, INPUT_SCALE)),
            )
            return store(parts, out)
        codes, scales, scale = self._encode(weight.float(), amax)
        parts = {CODES: pack(codes), SCALES: scales, SCALE: scale, INPUT_SCALE: torch.ones_like(scale)}
        return store(parts, out)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        if runs_kernels(parts[CODES], KERNEL_CAPABILITY):
            from miles_nvfp4 import kernels  # needs Triton

            return kernels.dequantize(parts[CODES].contiguous(), parts[SCALES].contiguous(), parts[SCALE])
        return _decode(unpack(parts[CODES]), parts[SCALES], parts[SCALE])

    def fake_quantize_activation(self, x: Tensor) -> Tensor:
        """See ``Format.fake_quantize_activation``; blocks of 1 x 16 and an FP32 scale per token."""
        rows = x.reshape(-1, x.shape[-1])
        if not self.four_over_six and runs_kernels(rows, KERNEL_CAPABILITY):
            from miles_nvfp4 import kernels  # needs Triton

            return kernels.fake_quantize(convert_for_kernel(rows)).reshape(x.shape).to(x.dtype)
        rows = rows.float()
        codes, scales, scale = self._encode(rows, rows.abs().amax(-1, keepdim=True))
        return _decode(codes, scales, scale).reshape(x.shape).to(x.dtype)

    def config(self, unquantized: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": BLOCK,
            "ignore": list(unquantized),
        }

    def files(self, unquantized: list[str]) -> dict[str, dict[str, Any]]:
        quantization = {"quant_algo": "NVFP4", "group_size": BLOCK, "exclude_modules": list(unquantized)}
        return {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}

    def _encode(self, rows: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise FP32 [N, K] to codes uint8 [N, K], block scales E4M3 [N, K/16], and an FP32 outer scale shaped as ``amax``.

        ``amax``: the magnitude that the outer scale maps to the maximum, a scalar or [N, 1]."""
        blocks = rows.reshape(rows.shape[0], rows.shape[1] // BLOCK, BLOCK)
        largest = blocks.abs().amax(-1)
        encode = self._encode_scale(amax)
        decode = torch.div(torch.ones_like(encode), encode)
        if not self.four_over_six:
            sixth = torch.div(torch.ones_like(encode), torch.full_like(encode, E2M1_MAX))
            scales = _e4m3(largest * (encode * sixth))
            return _codes(blocks, scales, decode).reshape(rows.shape), scales, decode
        base = torch.div(largest, torch.full_like(largest, E2M1_MAX)) * encode
        six, four = _e4m3(base), _e4m3(base * 1.5)
        codes_six, codes_four = _codes(blocks, six, decode), _codes(blocks, four, decode)
        better = self._error(blocks, codes_four, four, amax) < self._error(blocks, codes_six, six, amax)
        codes = torch.where(better[..., None], codes_four, codes_six).reshape(rows.shape)
        # uint8, because where() does not take E4M3 on every device
        scales = torch.where(better, four.view(torch.uint8), six.view(torch.uint8)).view(E4M3)
        return codes, scales, decode

    def _encode_scale(self, amax: Tensor) -> Tensor:
        """Return S for an FP32 amax of any shape."""
        encode = torch.div(torch.full_like(amax, self.largest_scale * E2M1_MAX), amax).clamp_(max=FP32_MAX)
        return torch.where(amax == 0, torch.ones_like(amax), encode)

    def _error(self, blocks: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        """Return the sum of squared errors of each block, added element by element so that the order is fixed."""
        divisor = torch.full_like(amax, self.largest_scale * E2M1_MAX)
        total = torch.zeros_like(blocks[..., 0])
        for i in range(BLOCK):
            value = torch.div(values(codes[..., i]) * scales.float() * amax, divisor)
            difference = value - blocks[..., i]
            total = total + difference * difference
        return total


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(max=E4M3_MAX).to(E4M3)


def _codes(blocks: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    """Return the E2M1 codes of [N, K/16, 16] for these scales; 0 if the block's scale is 0."""
    scale = scales.float()
    inverse = torch.div(torch.ones_like(scale), scale * decode).clamp_(max=FP32_MAX)
    return e2m1(blocks * inverse[..., None]).masked_fill_((scale == 0)[..., None], 0)


def _decode(codes: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    blocks = values(codes).reshape(*scales.shape, BLOCK) * scales.float()[..., None]
    return blocks.reshape(codes.shape) * scale


def e2m1(x: Tensor) -> Tensor:
    """Return the uint8 code of the nearest E2M1 number, ties to even, saturating: index of the magnitude, + 8 if negative."""
    magnitude = x.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def values(codes: Tensor) -> Tensor:
    """Return the FP32 values of E2M1 codes."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    return table[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Pack codes uint8 [N, K] into [N, K/2], the even index in the low bits."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(pairs: Tensor) -> Tensor:
    """Inverse of ``pack``."""
    return torch.stack([pairs & 15, pairs >> 4], -1).reshape(pairs.shape[0], -1)
