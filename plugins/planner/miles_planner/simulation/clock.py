"""A virtual clock: an event loop whose time jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at 0 and advances only to the next timer, when nothing else is left to do.

    Work in threads takes no virtual time: the loop may jump while a thread computes.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now


class _Selector(selectors.DefaultSelector):
    """Polls files without waiting; a timeout advances the virtual clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is None:  # only another thread or a signal can continue
            return super().select(None)
        if not found and timeout:
            self.loop.now += timeout
        return found
