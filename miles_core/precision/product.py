"""Matrix products of quantised layers: native products, in which tensor cores read codes, and emulated products.

An emulated product dequantises both operands to the model's dtype and multiplies them in that dtype. It runs on every device, and both
sides on one machine call the same function with the same numbers. Tensor cores of some GPUs read the codes directly and apply each
block's scale to its partial sum. This is faster and rounds less, because operands are not rounded to BF16 after dequantisation. The
codes are the same bytes in both cases, but the results differ. Therefore a format declares a bound on the distance between its native
and its emulated product, and every run measures it before the first step (``mismatch.product_probe``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class NoProduct(Exception):
    """Raised if a format has no native product for a device or dtype. The message is the reason, worded to follow "because"."""


class Product(ABC):
    """A format's native product on a device.

    Attributes:
        device, dtype: device and dtype of the operands; the result has the same dtype.
        eps: declared bound on the distance from the emulated product: the root mean square of the differences divided by that of
            the values.
        joint_dim: dimension along which the prepared parts of several weights with the same input can be concatenated.
    """

    eps: float
    joint_dim = 0

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def takes(self, shape: tuple[int, int]) -> bool:
        """Return whether the product supports a weight [N, K]; other weights use the emulated product."""
        return True

    @abstractmethod
    def prepare(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a stored weight (``Format.storage``) to the layout of codes and scales that the tensor cores need, as views or copies.
        Tensors that the caller stores keep these strides."""

    def restore(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """Convert the result of ``prepare`` for a weight [N, K] back to ``Format.storage``, as views or copies. None if the layout cannot be
        converted back: an engine then keeps the decoded weight as well. If all results are views, the codes of a new weight may be written to
        them instead of being prepared."""
        return None

    def transpose(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Prepare the transposed weight [K, N] of a stored weight [N, K], to multiply gradients [M, N] by it. None if the format's blocks are
        those of rows, so that the transposed weight has other codes."""
        return None

    def keep_rows(self, x: Tensor, uses: int) -> None:
        """Quantise x [M, K] once for the next ``uses`` products of it, if the product can."""

    @abstractmethod
    def __call__(self, x: Tensor, weight: Mapping[str, Tensor], bias: Tensor | None = None) -> Tensor:
        """Multiply x [M, K] in ``dtype``, M >= 1, by a prepared weight [N, K]; return [M, N].

        Quantises ``x`` to the codes that ``Format.fake_quantize_activation`` dequantises; each row is quantised independently.
        ``bias`` is [N] in ``dtype``."""

    def joins(self, shapes: Sequence[tuple[int, int]]) -> bool:
        """Return whether prepared weights of these shapes [N, K], one after the other along ``joint_dim``, are one prepared weight."""
        return False

    def row_epilogue(self, shape: tuple[int, int], uses: int = 1) -> Any:
        """Return what the kernel that computes rows of ``shape`` [M, K] needs to write their codes as well: the next ``uses`` products
        of these rows, with linear layers or with experts, then read them. Its type is the backend's. None if the product quantises
        these rows itself."""
        return None

    def takes_experts(self, gate_up: tuple[int, int], down: tuple[int, int]) -> bool:
        """Return whether ``experts`` supports standard experts whose weights have these shapes [2 I, D] and [D, I]; others are emulated."""
        return False

    def experts(
        self, x: Tensor, row: Tensor, ends: Tensor, gate_up: Mapping[str, Tensor], down: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute ``down(silu(gate) * up)`` of every choice of an expert, without gradient.

        Args:
            x: [rows, D] in ``dtype``.
            row: [choices] int64 row of each choice; choices are sorted by expert.
            ends: [experts] int32, end of each expert's choices.
            gate_up: ``Format.storage`` of [2 I, D], the gate above, with a first dimension of experts.
            down: likewise of [D, I].

        Returns:
            [choices, D] in ``dtype``.
        """
        raise NotImplementedError
