"""Codes of rows that the kernel which computes the rows writes as well, so that a product needs no launch to quantise them.

``store_codes`` is the end of such a kernel (``Product.row_epilogue``). It applies the rule of ``kernels`` to the rounded values, and writes the
bytes that ``kernels.activation_codes`` would write.
"""

# No postponed annotations here: Triton reads the ``constexpr`` ones.
# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from miles_fp8.kernels import TILE, _quantized, allocate_codes
from miles_fp8.kept_codes import Codes, KeptCodes

_TILE = tl.constexpr(TILE)


@triton.jit
def _store(value, row, start, width, padded, codes, scales, POWER_OF_TWO: tl.constexpr):
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = value.shape[1]
    SPAN: tl.constexpr = min(COLUMNS, _TILE)  # narrower rows are one block, too
    BLOCKS: tl.constexpr = COLUMNS // SPAN
    found, scale = _quantized(tl.reshape(value, [ROWS * BLOCKS, SPAN]), POWER_OF_TWO)
    column = start + tl.arange(0, COLUMNS)[None, :]
    tl.store(codes + row * width + column, tl.reshape(found, [ROWS, COLUMNS]), mask=(row < padded) & (column < width))
    block = start // _TILE + tl.arange(0, BLOCKS)[None, :]
    inside = (row < padded) & (block * _TILE < width)
    tl.store(scales + block * padded + row, tl.reshape(scale, [ROWS, BLOCKS]), mask=inside)


@triton.jit
def store_codes(value, row, start, width, padded, codes, scales):
    """See ``miles_embedded.kernels.epilogue.RowEpilogue.store``."""
    _store(value, row, start, width, padded, codes, scales, False)


@triton.jit
def store_codes_power_of_two(value, row, start, width, padded, codes, scales):
    """``store_codes`` with scales that are powers of two."""
    _store(value, row, start, width, padded, codes, scales, True)


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
        self, shape: tuple[int, int], device: torch.device, power_of_two: bool, kept: KeptCodes, uses: int
    ) -> None:
        self.memory: Codes = allocate_codes(*shape, device)
        self.rows = len(self.memory[0])
        self.store = store_codes_power_of_two if power_of_two else store_codes
        self._kept, self._uses = kept, uses

    def finish(self, rows: Tensor) -> None:
        """Keep the codes for the products of ``rows`` [..., K]; their kernel has been launched."""
        codes, scales = self.memory
        self._kept.put(rows, (codes, scales.t()), self._uses)
