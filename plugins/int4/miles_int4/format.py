"""INT4: four bits per weight and one scale per group, with quantisation-aware training.

A group of g neighbours in a row is represented by fifteen equidistant values, -7 to 7; the group's scale maps its largest magnitude to 7.
The format is symmetric, so zero stays zero and no offset is stored; -8 is unused, so that negating a weight negates its code. Only weights
are quantised: GEMMs run in the activations' precision. The benefit is less memory and, at small batches, less memory traffic.

    scale = BF16(max(amax / 7, 1e-5))
    code  = clamp(round(w / scale), -7, 7)   ties to even, w / scale in FP32

The scale is rounded to BF16 before the division, in the trainer too, because the checkpoint stores BF16 scales; a trainer that divided by
the unrounded scale would train other weights than the engine serves. The lower bound avoids a division by zero. The group size is part of
the format: the same weights at g = 32 and g = 128 differ by 12 %, as much as either differs from the original.

Four bits are coarse: rounding a trained model costs accuracy. In quantisation-aware training, the forward pass uses the rounded weights while
the optimizer updates the full-precision weights with a straight-through gradient (Bengio et al., arXiv 1308.3432). The model adapts to the
rounding, and engine and trainer agree throughout.

Stored as compressed-tensors' ``pack-quantized``: code + 8 in four bits, eight of a row in one int32, the first in the
lowest bits. Relative RMS error on N(0, 1): 0.0970 at g = 32, 0.1173 at g = 128. Bits per weight: 4 + 16 / g. Quantising the FP32
``dequantize(quantize(w))`` again gives the same bytes; a BF16 copy of it may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from miles_formats import Config, Format, Parts, Stored, allocate_output, convert_for_kernel, runs_kernels, store

LARGEST = 7.0
OFFSET = 8
SCALE_FLOOR = 1e-5
PER_WORD = 8
CODES, SCALES, SHAPE = "weight_packed", "weight_scale", "weight_shape"
ROUTED_EXPERTS = ("*.experts.*",)


class Int4(Format):
    """Group-wise symmetric INT4: codes from -7 to 7, one BF16 scale for each group of a row.

    Stored as ``X.weight_packed`` int32 [N, K/8], ``X.weight_scale`` BF16 [N, K/g] and ``X.weight_shape`` int32 [2] =
    (N, K), with w = code * scale.

    Args:
        group_size: g, weights of a row that share a scale.
        experts_only: quantise routed experts only.
        skip: selectors of weights to leave unquantised.
    """

    name = "int4"
    only_origin = "--int4-scope experts"
    skip_origin = "--int4-skip-layers"

    def __init__(self, group_size: int = 128, experts_only: bool = False, skip: tuple[str, ...] = ()) -> None:
        self.group_size = group_size
        self.tile = (1, group_size)
        self.error = 0.13 if group_size <= 256 else 0.2  # grows with the expected maximum of a group
        self.only = ROUTED_EXPERTS if experts_only else ()
        self.skip = skip

    @classmethod
    def from_config(cls, config: Config) -> Int4:
        options = config.plugin("int4")
        return cls(options.group_size, options.scope == "experts", options.skip_layers)

    @classmethod
    def recognises(cls, block: Mapping[str, Any]) -> bool:
        return block.get("quant_method") == "compressed-tensors" and _group_size(block) is not None

    @classmethod
    def from_checkpoint(cls, block: Mapping[str, Any]) -> Int4:
        size = _group_size(block)
        assert size is not None
        return cls(size)

    def refuse(self, shape: tuple[int, int]) -> str | None:
        columns = shape[1]
        if columns % PER_WORD:
            return (
                f"{PER_WORD} weights share an int32, so K must be a multiple of {PER_WORD}, not {columns}; leave it in "
                f"bf16 with {self.skip_origin}"
            )
        if columns % self.group_size == 0:
            return None
        return (
            f"the group size {self.group_size} does not divide K = {columns}; --int4-group-size {_sizes(columns)} would "
            f"(one size for all weights), or leave it in bf16 with {self.skip_origin}"
        )

    def storage(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        rows, columns = shape
        return (
            Stored(CODES, torch.int32, (rows, columns // PER_WORD)),
            Stored(SCALES, torch.bfloat16, (rows, columns // self.group_size)),
            Stored(SHAPE, torch.int32, (2,)),
        )

    def quantize(self, weight: Tensor, stats: Tensor | None = None, out: Parts | None = None) -> Parts:
        rows, columns = weight.shape
        if runs_kernels(weight):
            from miles_int4 import kernels  # needs Triton

            if kernels.suits(self.group_size):
                parts = allocate_output(self, (rows, columns), weight.device, out)
                kernels.quantize(convert_for_kernel(weight), parts[CODES], parts[SCALES], parts[SHAPE], self.group_size)
                return store(parts, out)
        groups = weight.float().reshape(rows, columns // self.group_size, self.group_size)
        amax = groups.abs().amax(-1)
        # A full tensor as divisor: dividing by a Python number multiplies by its reciprocal on a GPU.
        scale = torch.div(amax, torch.full_like(amax, LARGEST)).clamp_(min=SCALE_FLOOR).bfloat16()
        codes = torch.div(groups, scale.float()[..., None]).round_().clamp_(-LARGEST, LARGEST)
        shape = torch.tensor([rows, columns], dtype=torch.int32, device=weight.device)
        return store({CODES: pack(codes.reshape(rows, columns)), SCALES: scale, SHAPE: shape}, out)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        if runs_kernels(parts[CODES]):
            from miles_int4 import kernels  # needs Triton

            return kernels.dequantize(parts[CODES].contiguous(), parts[SCALES].contiguous())
        codes, scale = unpack(parts[CODES]), parts[SCALES].float()
        rows, columns = codes.shape
        return (codes.reshape(rows, scale.shape[1], -1) * scale[..., None]).reshape(rows, columns)

    def dequantize_stacked(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        words, scales = parts[CODES].flatten(0, 1), parts[SCALES].flatten(0, 1)
        if runs_kernels(words) and out.is_contiguous():
            from miles_int4 import kernels  # needs Triton

            kernels.dequantize(words, scales, out.flatten(0, 1))
        else:
            out.copy_(self.dequantize({CODES: words, SCALES: scales}).view(out.shape))

    def config(self, unquantized: list[str]) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            # without it, Transformers treats the checkpoint as not yet quantised and starts from random weights
            "quantization_status": "compressed",
            "ignore": list(unquantized),
        }


def _group_size(block: Mapping[str, Any]) -> int | None:
    """Return the group size of a compressed-tensors block; None if the block describes another format."""
    sizes = set()
    for group in (block.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        ours = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        packed = (group.get("format") or block.get("format")) == "pack-quantized"
        if not packed or any(weights.get(k) != v for k, v in ours.items()) or weights.get("actorder"):
            return None
        if group.get("input_activations"):
            return None
        sizes.add(weights.get("group_size"))
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) and size > 0 else None


def pack(codes: Tensor) -> Tensor:
    """Pack codes -8..7 [N, K] of any numeric dtype into int32 [N, K/8], the first of eight in the lowest bits."""
    nibbles = (codes + OFFSET).to(torch.uint8)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)  # little-endian: four bytes are one int32, lowest first
    return pairs.contiguous().view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Inverse of ``pack``, FP32."""
    pairs = words.contiguous().view(torch.uint8)
    nibbles = torch.stack([pairs & 15, pairs >> 4], -1)
    return nibbles.reshape(words.shape[0], -1).float() - OFFSET


def _sizes(columns: int) -> str:
    """Return the group sizes that divide K as text, common sizes first."""
    divisors = [g for g in range(2, columns + 1) if columns % g == 0]
    usual = [g for g in divisors if g in (16, 32, 64, 128, 256)]
    return ", ".join(map(str, usual or divisors[-4:]))
