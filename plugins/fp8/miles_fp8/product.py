"""FP8 GEMMs on Hopper's tensor cores, through ``torch.nn.functional.scaled_mm`` and cuBLAS.

    y = sum over blocks b of 128 along K:  sx[m, b] * sw[n / 128, b] * (codes of x . codes of w in the block)

The scales multiply partial sums, so every 128 elements a partial sum moves from the tensor core's accumulator (about 14 bits) to FP32. The
result is rounded to BF16 once. The emulated product also rounds both dequantised operands to BF16. Relative to the exact product of the
codes, the native product therefore has the error of rounding to BF16, and the emulated one a larger error. In a long sum of positive
numbers, the accumulator's truncation causes a bias below .0015 of the result (tests/test_product.py).

cuBLAS supports this GEMM only on sm_90 (12.9 and later). It needs a weight's scales in K-major rows padded to a multiple of four, an
activation's scales M-major with M a multiple of four, and N and K multiples of 16. For few rows it is often slower than BF16's product.
Products of few rows and of experts therefore use separate kernels (``product_kernels``), which multiply the same codes and sum in the same
precision.

A kernel that computes rows may write their codes as well (``row_epilogue``); a product of these rows finds them (``row_cache``).

The kernel, its tile and the division of K depend on the number of rows, so the last bit of a row does, too. With ``fixed_order`` one kernel with
one tile computes every product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_formats import Parts, Product, convert_for_kernel, need_scaled_mm
from miles_fp8.layout import CODES, SCALES, TILE
from miles_fp8.row_cache import Codes, QuantizedRowCache

if TYPE_CHECKING:
    from miles_fp8.row_codes import RowCodes

HOPPER = range(9, 10)


class Fp8Product(Product):
    """FP8 GEMM on the tensor cores of Hopper GPUs.

    Args:
        device: a GPU.
        dtype: BF16.
        power_of_two_scales: of activations; see ``Fp8``.
        fixed_order: a row's result does not depend on the number of rows.

    Raises:
        NoProduct: the GPU is not sm_90, the dtype is not BF16, or the libraries do not support this GEMM.
    """

    eps = 0.01
    joint_dim = 1

    def __init__(
        self, device: torch.device, dtype: torch.dtype, power_of_two_scales: bool = False, fixed_order: bool = False
    ) -> None:
        need_scaled_mm(device, dtype, HOPPER, cuda=(12, 9))
        super().__init__(device, dtype)
        self.power_of_two_scales = power_of_two_scales
        self.fixed_order = fixed_order
        self.kept = QuantizedRowCache()
        self._tickets: Tensor | None = None

    def takes(self, shape: tuple[int, int]) -> bool:
        return shape[0] % 16 == 0 and shape[1] % 16 == 0

    def prepare(self, parts: Mapping[str, Tensor]) -> Parts:
        return {CODES: parts[CODES].contiguous().t(), SCALES: scale_rows(parts[SCALES]).t()}

    def restore(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
        return {CODES: parts[CODES].t(), SCALES: parts[SCALES].t()[:, : -(-shape[1] // TILE)]}

    def transpose(self, parts: Mapping[str, Tensor]) -> Parts:
        return self.prepare({name: tensor.t() for name, tensor in parts.items()})

    def keep_rows(self, x: Tensor, uses: int) -> None:
        self.kept.put(x, self.row_codes(x), uses)

    def row_epilogue(self, shape: tuple[int, int], uses: int = 1) -> RowCodes:
        from miles_fp8.row_codes import RowCodes  # needs Triton

        return RowCodes(shape, self.device, self.power_of_two_scales, self.kept, uses)

    def row_codes(self, x: Tensor) -> Codes:
        """Return the codes and scales of x [M, K]: those that its kernel wrote, otherwise from a launch."""
        from miles_fp8 import kernels  # needs Triton

        return self.kept.take(x) or kernels.activation_codes(convert_for_kernel(x), self.power_of_two_scales)

    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        from miles_fp8 import product_kernels  # needs Triton

        codes, scales, count = weight[CODES], weight[SCALES], x.shape[0]
        if self.fixed_order or product_kernels.takes(count, codes.shape[1], codes.shape[0]):
            rows, row_scales = self._rows(x)
            tile = product_kernels.FIXED if self.fixed_order else None
            exact = self.power_of_two_scales
            return product_kernels.linear(
                rows, row_scales, codes.t(), scales.t(), bias, self.tickets, exact, tile, rows=count
            )
        row_codes, row_scales = self.row_codes(x)
        kinds = torch.nn.functional.ScalingType
        y = torch.nn.functional.scaled_mm(
            row_codes,
            codes,
            row_scales,
            kinds.BlockWise1x128,
            scales,
            kinds.BlockWise128x128,
            bias=bias,
            output_dtype=self.dtype,
        )
        return y if y.shape[0] == count else y[:count]

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the codes and scales of x [M, K], or few rows themselves and None: their product quantises them."""
        from miles_fp8 import product_kernels

        if x.shape[0] > product_kernels.FEW or self.fixed_order:
            return self.row_codes(x)
        return self.kept.take(x) or (convert_for_kernel(x).contiguous(), None)

    @property
    def tickets(self) -> Tensor:
        """Counters for ``product_kernels``, allocated on first use, which must not be within the recording of a CUDA graph."""
        if self._tickets is None:
            from miles_fp8 import product_kernels

            self._tickets = torch.zeros(product_kernels.TICKETS, dtype=torch.int32, device=self.device)
        return self._tickets

    def joins(self, shapes: Sequence[tuple[int, int]]) -> bool:
        return len({k for _, k in shapes}) == 1 and all(n % TILE == 0 for n, _ in shapes)

    def takes_experts(self, gate_up: tuple[int, int], down: tuple[int, int]) -> bool:
        return gate_up[0] % (2 * TILE) == 0 and gate_up[1] % TILE == 0

    def experts(
        self, x: Tensor, row: Tensor, ends: Tensor, gate_up: Mapping[str, Tensor], down: Mapping[str, Tensor]
    ) -> Tensor:
        from miles_fp8 import kernels, product_kernels  # need Triton

        names, places = (CODES, SCALES), len(row)
        tile = product_kernels.FIXED_EXPERTS if self.fixed_order else None
        codes = self.row_codes(x)
        inner = product_kernels.expert_product(*codes, gate_up, names, row, ends, places, tile)
        codes = kernels.activation_codes(inner, self.power_of_two_scales)
        return product_kernels.expert_product(*codes, down, names, None, ends, places, tile)


def scale_rows(scales: Tensor) -> Tensor:
    """Pad scales [N tiles, K tiles] with zeros to a multiple of 4 K tiles; returns a contiguous tensor."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
