"""MXFP8 GEMMs on Blackwell's tensor cores, through ``torch.nn.functional.scaled_mm`` and cuBLAS.

The tensor core applies each block's power of two while it accumulates in FP32, and the result is rounded to BF16 once. Codes times powers of
two are exact in BF16, so the emulated product multiplies the same numbers and differs only by the order of summation.

Not tested on hardware, because no sm_100 GPU was available. Tests cover the layout of the scales against cuBLAS's description, and the
selection by compute capability. On such a GPU, the probe at the start of every run stops the run if the error of the product exceeds
``eps``; ``--quantized-product emulated`` avoids the native product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_formats import Parts, Product, convert_for_kernel, need_scaled_mm
from miles_mxfp8.layout import BLOCK, CODES, E4M3, SCALES

BLACKWELL = range(10, 100)
TILE = (128, 4)  # tile of scales in memory: 128 rows and 4 blocks along K


class Mxfp8Product(Product):
    """MXFP8 GEMM on the tensor cores of Blackwell GPUs.

    Raises:
        NoProduct: the GPU is older than sm_100, the dtype is not BF16, or the libraries do not support this GEMM.
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
        kernels.quantize(convert_for_kernel(x), codes, scales)
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
    """Flatten scale bytes [rows, blocks] in cuBLAS's order.

    Tiles of 128 rows x 4 blocks, padded with zeros, follow each other along K and then along rows. Inside a tile, row r and block b have the
    offset (r % 32) * 16 + (r // 32) * 4 + b (cuBLAS, "1D block scaling factors layout")."""
    rows, blocks = scales.shape
    filled = torch.nn.functional.pad(scales, (0, -blocks % TILE[1], 0, -rows % TILE[0]))
    down, across = filled.shape[0] // TILE[0], filled.shape[1] // TILE[1]
    return filled.view(down, 4, 32, across, TILE[1]).permute(0, 3, 2, 1, 4).flatten()
