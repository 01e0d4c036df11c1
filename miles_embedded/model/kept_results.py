"""Results that the first of several layers with the same input computes for the others."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping

from torch import Tensor


class KeptResults:
    """Keeps results until each layer has taken its result with the same input. Results are thread-local and are not copied."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[KeptResults], tuple[()]]:
        return KeptResults, ()

    def put(self, x: Tensor, results: Mapping[Hashable, Tensor]) -> None:
        """Replace the kept results by those for input ``x``, layer -> result."""
        self._local.found = x, dict(results)

    def clear(self) -> None:
        """Drop what is kept."""
        self._local.found = None

    def take(self, layer: Hashable, x: Tensor) -> Tensor | None:
        """Return and remove the result of ``layer`` for this tensor object; None if there is none."""
        kept = getattr(self._local, "found", None)
        if kept is None or kept[0] is not x or layer not in kept[1]:
            return None
        found: Tensor = kept[1].pop(layer)
        if not kept[1]:
            self.clear()
        return found
