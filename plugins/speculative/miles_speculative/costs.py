"""Measures the cost of a step with drafts, relative to a step without."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

#: Number of most recent steps that are compared with each other.
_AROUND = 12


class Costs:
    """Costs of steps at one batch size, in units of a step without drafts.

    Other load on the machine and longer texts change the times of all steps, so only recent steps are compared with each other. A number
    of drafts that is not in use keeps its last cost.

    Args:
        guess: number of drafts -> cost at another batch size; used until the cost is measured at this one.
    """

    def __init__(self, guess: Mapping[int, float] | None = None) -> None:
        self._guess = dict(guess or {})
        #: number of drafts -> measured cost, now and before the current comparison
        self.ratios, self._before = {0: 1.0}, {0: 1.0}
        self._seen: set[int] = set()
        self._newest: deque[tuple[int, float]] = deque(maxlen=_AROUND)
        #: how many of the last steps had the same number of drafts, and whether a comparison is in progress
        self._alike, self._comparing = 0, False

    @property
    def known(self) -> dict[int, float]:
        """Number of drafts -> cost, measured or guessed."""
        return self._guess | self.ratios

    def add(self, k: int, seconds: float) -> None:
        """Record the seconds of a step with k drafts. The first step for each k is ignored, because it includes allocation and warm-up."""
        if k not in self._seen:
            self._seen.add(k)
            return
        self._alike = self._alike + 1 if self._newest and self._newest[-1][0] == k else 1
        self._newest.append((k, seconds))
        if self._alike >= len(self._newest):
            if self._comparing:
                self._before, self._comparing = dict(self.ratios), False
            return
        self._comparing, kinds = True, {kind for kind, _ in self._newest}
        standard, plain = self._standard, self.plain
        if standard is None or plain is None:
            return
        # costs measured relative to each other would drift, so only unknown costs are measured relative to steps with drafts
        for kind in kinds - {standard}:
            found, before = self._typical(kind) / plain, self._before.get(kind)
            if before is None:
                self.ratios[kind] = found
            elif not standard:
                self.ratios[kind] = (found + before) / 2

    @property
    def plain(self) -> float | None:
        """Current seconds of a step without drafts; None if unknown."""
        standard = self._standard
        return None if standard is None else self._typical(standard) / self.ratios[standard]

    def of(self, k: int) -> float:
        """Return the cost of a step with k drafts; extrapolates linearly from the largest known number of drafts."""
        known = self.known
        most = max(known)
        return known[k] if k in known else 1 + (known[most] - 1) * k / max(most, 1)

    @property
    def _standard(self) -> int | None:
        """Number of drafts of the reference steps: 0 if there are recent plain steps, else the oldest recent kind with a known cost."""
        kinds = [kind for kind, _ in self._newest if kind in self.ratios]
        return None if not kinds else 0 if 0 in kinds else kinds[0]

    def _typical(self, kind: int) -> float:
        """Return the lower quartile of the seconds, because other load on the machine only adds time."""
        times = sorted(seconds for made, seconds in self._newest if made == kind)
        return times[(len(times) - 1) // 4]
