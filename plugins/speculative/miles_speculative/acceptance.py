"""Estimates how many tokens a step with drafts emits."""

from __future__ import annotations

from collections.abc import Sequence

#: Decay of older counts per step, and the batch size from which it applies in full; smaller batches decay proportionally less.
_FORGOTTEN, _MANY = 0.04, 4


class Acceptance:
    """Conditional acceptance rate of drafts by depth: how often a draft is kept if the previous one was kept.

    Counts decay exponentially at every depth. The estimate of a depth that is no longer tried therefore approaches that of the previous
    depth, and the depth is tried again once the previous one improves.
    """

    def __init__(self, most: int) -> None:
        self.reached, self.kept = [0.0] * most, [0.0] * most

    def add(self, tried: Sequence[int], kept: Sequence[int]) -> None:
        """Add the counts of one step; see ``Lookahead.record``."""
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
        """Return the expected tokens per row of a step with k drafts: 1 + a_1 + ... + a_k."""
        total, share, ratio = 1.0, 1.0, 0.5
        for depth in range(k):
            ratio = (self.kept[depth] + ratio) / (self.reached[depth] + 1)
            share *= ratio
            total += share
        return total
