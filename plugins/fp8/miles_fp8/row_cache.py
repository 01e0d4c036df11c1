"""Codes of the last rows whose kernel wrote them, until the products of these rows have read them."""

from __future__ import annotations

import threading

from torch import Tensor

Codes = tuple[Tensor, Tensor]


class QuantizedRowCache:
    """Keeps the codes of one tensor. The codes are thread-local and are not copied.

    A product may receive another view of the rows, so rows are recognised by their memory: the tensor is kept, too, so that its memory is not
    reused, and its version shows whether an operation changed it since.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[QuantizedRowCache], tuple[()]]:
        return QuantizedRowCache, ()

    def put(self, rows: Tensor, codes: Codes, uses: int) -> None:
        """Keep ``codes`` for the next ``uses`` products of ``rows`` [..., K], contiguous, in place of earlier ones."""
        # a tensor of inference mode has no version
        self._local.found = None if rows.is_inference() else (rows, rows._version, codes, uses)

    def take(self, x: Tensor) -> Codes | None:
        """Return the codes of x [M, K] if x is the memory that was kept; None otherwise."""
        kept = getattr(self._local, "found", None)
        if kept is None:
            return None
        rows, version, codes, uses = kept
        same = x.data_ptr() == rows.data_ptr() and x.numel() == rows.numel() and x.shape[-1] == rows.shape[-1]
        if not same or x.dtype != rows.dtype or not x.is_contiguous() or rows._version != version:
            return None
        self._local.found = (rows, version, codes, uses - 1) if uses > 1 else None
        found: Codes = codes
        return found
