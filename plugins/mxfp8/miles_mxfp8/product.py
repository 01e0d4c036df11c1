"""MXFP8 codes multiplied by Blackwell's tensor cores, through ``torch.nn.functional.scaled_mm`` and cuBLAS.

The tensor core applies each block's power of two while it sums in FP32, and the result is rounded to BF16 once. Codes times
powers of two are exact in BF16, so the emulated product multiplies the same numbers and differs by the order of summation.

Not run on hardware: nobody here has a GPU of sm_100. What is tested is the layout of the scales against cuBLAS'
description of it, and that the capability decides. On such a GPU the probe at the start of every run decides: a product
that is further off than ``eps`` stops it, and ``--quantized-product emulated`` does without.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_core.format import Parts, Product, need_scaled_mm, readable
from miles_mxfp8.format import BLOCK, CODES, E4M3, SCALES

BLACKWELL = range(10, 100)
TILE = (128, 4)  # scales that lie together: of 128 rows and 4 blocks along K


class Mxfp8Product(Product):
    """MXFP8 codes multiplied by the tensor cores of Blackwell GPUs.

    Raises:
        NoProduct: a GPU before sm_100, another dtype than BF16, or libraries without the product.
    """

    eps = 0.006

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        need_scaled_mm(device, dtype, BLACKWELL, cuda=(12, 8))
        super().__init__(device, dtype)

    def takes(self, shape: tuple[int, int]) -> bool:
        return shape[0] % 16 == 0

    def prepare(self, parts: Mapping[str, Tensor]) -> Parts:
        return {CODES: parts[CODES].contiguous().t(), SCALES: swizzled(parts[SCALES])}

    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        from miles_mxfp8 import kernels  # needs Triton

        codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
        scales = torch.empty((x.shape[0], x.shape[1] // BLOCK), dtype=torch.uint8, device=x.device)
        kernels.quantize(readable(x), codes, scales)
        kind, order = torch.nn.functional.ScalingType.BlockWise1x32, torch.nn.functional.SwizzleType.SWIZZLE_32_4_4
        return torch.nn.functional.scaled_mm(
            codes,
            weight[CODES],
            swizzled(scales).view(torch.float8_e8m0fnu),
            kind,
            weight[SCALES].view(torch.float8_e8m0fnu),
            kind,
            swizzle_a=order,
            swizzle_b=order,
            bias=bias,
            output_dtype=self.dtype,
        )


def swizzled(scales: Tensor) -> Tensor:
    """Scale bytes [rows, blocks] -> flat, in the order cuBLAS reads them.

    Tiles of 128 rows x 4 blocks, filled up with zeros, one after the other along K and then down. Inside of one, row r and
    block b are at (r % 32) * 16 + (r // 32) * 4 + b (cuBLAS, "1D block scaling factors layout")."""
    rows, blocks = scales.shape
    filled = torch.nn.functional.pad(scales, (0, -blocks % TILE[1], 0, -rows % TILE[0]))
    down, across = filled.shape[0] // TILE[0], filled.shape[1] // TILE[1]
    return filled.view(down, 4, 32, across, TILE[1]).permute(0, 3, 2, 1, 4).flatten()
