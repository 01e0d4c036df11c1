"""Results that the first of several layers computes for the others, because all of them read one input."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping

from torch import Tensor


class KeptResults:
    """Keeps results until each layer has taken its own with the same input. Every thread has results of its own; copies have none."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[KeptResults], tuple[()]]:
        return KeptResults, ()

    def put(self, x: Tensor, results: Mapping[Hashable, Tensor]) -> None:
        """Replace what is kept by the results for input ``x``, layer -> result."""
        self._local.found = x, dict(results)

    def clear(self) -> None:
        """Drop what is kept."""
        self._local.found = None

    def take(self, layer: Hashable, x: Tensor) -> Tensor | None:
        """Return the result of ``layer`` for this very tensor, once; None if there is none."""
        kept = getattr(self._local, "found", None)
        if kept is None or kept[0] is not x or layer not in kept[1]:
            return None
        found: Tensor = kept[1].pop(layer)
        if not kept[1]:
            self.clear()
        return found
