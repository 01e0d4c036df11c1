"""How many tokens are drafted a step."""

from __future__ import annotations


class Fixed:
    """The same number at every step."""

    def __init__(self, k: int) -> None:
        self.k = self.most = k

    def choose(self, rows: int) -> int:
        """Tokens to draft for a batch of ``rows``."""
        return self.k
