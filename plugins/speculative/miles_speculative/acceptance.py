"""How many tokens a step with drafts emits."""

from __future__ import annotations

from collections.abc import Sequence

#: What a step forgets of the counts of drafts before it; of a batch smaller than this, in proportion less.
_FORGOTTEN, _MANY = 0.04, 4


class Acceptance:
    """How often a draft is kept if the one before it was, by depth.

    Old steps count less, at every depth, so that a depth which is no longer tried comes to be judged by the one before it, and is tried
    again when that one became better.
    """

    def __init__(self, most: int) -> None:
        self.reached, self.kept = [0.0] * most, [0.0] * most

    def add(self, tried: Sequence[int], kept: Sequence[int]) -> None:
        """Counts of one step, see ``Lookahead.record``."""
        if not tried:
            return
        memory = 1 - _FORGOTTEN * min(tried[0] / _MANY, 1.0)
        before = tried[0]
        for depth in range(len(self.kept)):
            self.reached[depth] *= memory
            self.kept[depth] *= memory
            if depth < len(tried):
                self.reached[depth] += min(before, tried[depth])
                self.kept[depth] += kept[depth]
                before = kept[depth]

    def length(self, k: int) -> float:
        """Tokens that a step with k drafts emits a row: 1 + a_1 + ... + a_k."""
        total, share, ratio = 1.0, 1.0, 0.5
        for depth in range(k):
            ratio = (self.kept[depth] + ratio) / (self.reached[depth] + 1)
            share *= ratio
            total += share
        return total
