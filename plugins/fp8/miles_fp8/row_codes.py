"""Lets the kernel that computes rows also write their codes, so that a product needs no separate launch to quantise them. ``store_codes``
is the epilogue of such a kernel (``Product.row_epilogue``). It applies the rule of ``kernels`` to the rounded values, and writes the
bytes that ``kernels.activation_codes`` would write.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_fp8.kernels import TILE, _quantized, allocate_codes
from miles_fp8.row_cache import Codes, QuantizedRowCache

_TILE = tl.constexpr(TILE)


@triton.jit
def _store(value, first, start, width, padded, codes, scales, POWER_OF_TWO: tl.constexpr):
    SPAN: tl.constexpr = min(value.shape[1], _TILE)  # narrower rows are one block, too
    BLOCKS: tl.constexpr = value.shape[1] // SPAN
    COUNT: tl.constexpr = value.shape[0] * BLOCKS
    # Nothing is stored in the shape of ``value``: Triton would align the kernel's layout to it, and a sum over columns has the order of its layout.
    found, scale = _quantized(tl.reshape(value, [COUNT, SPAN]), POWER_OF_TWO)
    piece = tl.arange(0, COUNT)[:, None]
    row, block = first + piece // BLOCKS, start // _TILE + piece % BLOCKS
    column = block * _TILE + tl.arange(0, SPAN)[None, :]
    tl.store(codes + row * width + column, found, mask=(row < padded) & (column < width))
    tl.store(scales + block * padded + row, scale, mask=(row < padded) & (block * _TILE < width))


@triton.jit
def store_codes(value, first, start, width, padded, codes, scales):
    """See ``miles_embedded.kernels.epilogue.RowEpilogue.store``."""
    _store(value, first, start, width, padded, codes, scales, False)


@triton.jit
def store_codes_power_of_two(value, first, start, width, padded, codes, scales):
    """``store_codes`` with scales that are powers of two."""
    _store(value, first, start, width, padded, codes, scales, True)


class RowCodes:
    """The codes of rows [M, K] that a kernel is about to compute; a ``miles_embedded.kernels.epilogue.RowEpilogue``.

    Args:
        shape: M and K.
        device: of the rows.
        power_of_two: round scales up to powers of two.
        kept: receives the codes.
        uses: number of products that read them.
    """

    tile = TILE

    def __init__(
        self, shape: tuple[int, int], device: torch.device, power_of_two: bool, kept: QuantizedRowCache, uses: int
    ) -> None:
        self.memory: Codes = allocate_codes(*shape, device)
        self.rows = len(self.memory[0])
        self.store = store_codes_power_of_two if power_of_two else store_codes
        self._kept, self._uses = kept, uses

    def finish(self, rows: Tensor) -> None:
        """Keep the codes for the products of ``rows`` [..., K]; their kernel has been launched."""
        codes, scales = self.memory
        self._kept.put(rows, (codes, scales.t()), self._uses)
