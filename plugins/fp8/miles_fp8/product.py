"""FP8 GEMMs on Hopper's tensor cores, through ``torch.nn.functional.scaled_mm`` and cuBLAS.

    y = sum over blocks b of 128 along K:  sx[m, b] * sw[n / 128, b] * (codes of x . codes of w in the block)

The scales multiply partial sums, so every 128 elements a partial sum moves from the tensor core's accumulator (about 14 bits) to FP32. The
result is rounded to BF16 once. The emulated product also rounds both dequantised operands to BF16. Relative to the exact product of the
codes, the native product has an RMS error of .0017 on N(0, 1), the emulated one .0027; their difference is .0030
(benchmarks/quantized_product.py). In a long sum of positive numbers, the accumulator's truncation causes a bias below .0015 of the result
(tests/test_product.py).

cuBLAS supports this GEMM only on sm_90 (12.9 and later). It needs a weight's scales in K-major rows padded to a multiple of four, an
activation's scales M-major with M a multiple of four, and N and K multiples of 16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_core.format import Parts, Product, convert_for_kernel, need_scaled_mm
from miles_fp8.format import CODES, SCALES

HOPPER = range(9, 10)


class Fp8Product(Product):
    """FP8 GEMM on the tensor cores of Hopper GPUs.

    Raises:
        NoProduct: the GPU is not sm_90, the dtype is not BF16, or the libraries do not support this GEMM.
    """

    eps = 0.01

    def __init__(self, device: torch.device, dtype: torch.dtype, power_of_two_scales: bool = False) -> None:
        need_scaled_mm(device, dtype, HOPPER, cuda=(12, 9))
        super().__init__(device, dtype)
        self.power_of_two_scales = power_of_two_scales

    def takes(self, shape: tuple[int, int]) -> bool:
        return shape[0] % 16 == 0 and shape[1] % 16 == 0

    def prepare(self, parts: Mapping[str, Tensor]) -> Parts:
        return {CODES: parts[CODES].contiguous().t(), SCALES: scale_rows(parts[SCALES]).t()}

    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        from miles_fp8 import kernels  # needs Triton

        codes, scales = kernels.activation_codes(convert_for_kernel(x), self.power_of_two_scales)
        kinds = torch.nn.functional.ScalingType
        y = torch.nn.functional.scaled_mm(
            codes,
            weight[CODES],
            scales,
            kinds.BlockWise1x128,
            weight[SCALES],
            kinds.BlockWise128x128,
            bias=bias,
            output_dtype=self.dtype,
        )
        return y if len(y) == len(x) else y[: len(x)]


def scale_rows(scales: Tensor) -> Tensor:
    """Pad scales [N tiles, K tiles] with zeros to a multiple of 4 K tiles; returns a contiguous tensor."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
