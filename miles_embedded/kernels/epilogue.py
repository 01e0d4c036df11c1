"""Epilogue of a kernel that computes rows, which may also store them in a second form, such as the codes of a number format."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class RowEpilogue(Protocol):
    """Stores rows [M, K] in a second form. Norm, gate and attention kernels accept one.

    Attributes:
        store: Triton function ``store(value, first, start, width, padded, *memory)``. A kernel calls it with values [R, C] FP32: rows from
            ``first`` (int64) and columns from ``start`` on, rounded to the type of the rows, and zeros outside the M x K values. C is a
            power of two; ``start`` is a multiple of ``tile``, and so is C, unless the block contains all columns. The argument ``width`` is
            K, and ``padded`` is the attribute ``rows``. ``store`` may not change the order in which the kernel adds.
        memory: two tensors for ``store``.
        rows: number of rows that ``store`` has to be called for: M, or more.
        tile: see ``store``.
    """

    store: Any
    memory: tuple[Tensor, Tensor]
    rows: int
    tile: int

    def finish(self, rows: Tensor) -> None:
        """Receive the rows [..., K], contiguous, after the launch of the kernel that computes them."""


def end_of(epilogue: RowEpilogue | None, rows: int, unused: Tensor) -> tuple[int, Any, tuple[Tensor, Tensor]]:
    """Return the arguments of a kernel for its epilogue: the rows to compute, ``store`` and its memory; without one ``rows``, None and ``unused``
    tensors."""
    return (rows, None, (unused, unused)) if epilogue is None else (epilogue.rows, epilogue.store, epilogue.memory)
