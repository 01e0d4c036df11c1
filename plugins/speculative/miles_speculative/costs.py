"""What a step with drafts costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

#: Steps are compared with those around them, so many.
_AROUND = 12


class Costs:
    """Of one batch size, in steps without drafts.

    Other work on the machine and longer texts change the times of all steps, so only steps of the same moment are compared, and what is not
    made keeps the cost that it had.

    Args:
        guess: drafts -> cost at another batch size, until it was measured at this one.
    """

    def __init__(self, guess: Mapping[int, float] | None = None) -> None:
        self._guess = dict(guess or {})
        #: drafts -> cost, as measured, and as it was before the comparison that goes on
        self.ratios, self._before = {0: 1.0}, {0: 1.0}
        self._seen: set[int] = set()
        self._newest: deque[tuple[int, float]] = deque(maxlen=_AROUND)
        #: how many of the last steps are of one kind, and whether others were among the newest since ``_before``
        self._alike, self._comparing = 0, False

    @property
    def known(self) -> dict[int, float]:
        """drafts -> cost, measured or guessed."""
        return self._guess | self.ratios

    def add(self, k: int, seconds: float) -> None:
        """A step with k drafts took so long. The first of its kind is not counted: it pays for memory and code that the others find."""
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
        # costs that are measured by one another would drift, so only a cost that is not known yet is measured by other than plain steps
        for kind in kinds - {standard}:
            found, before = self._typical(kind) / plain, self._before.get(kind)
            if before is None:
                self.ratios[kind] = found
            elif not standard:
                self.ratios[kind] = (found + before) / 2

    @property
    def plain(self) -> float | None:
        """Seconds of a step without drafts now; None where that is not known."""
        standard = self._standard
        return None if standard is None else self._typical(standard) / self.ratios[standard]

    def of(self, k: int) -> float:
        """Of a number that was not tried, what as many drafts more would cost as those of the most that was tried."""
        known = self.known
        most = max(known)
        return known[k] if k in known else 1 + (known[most] - 1) * k / max(most, 1)

    @property
    def _standard(self) -> int | None:
        """What others are measured by: plain steps, else the kind that was made before the others."""
        kinds = [kind for kind, _ in self._newest if kind in self.ratios]
        return None if not kinds else 0 if 0 in kinds else kinds[0]

    def _typical(self, kind: int) -> float:
        """The lower quartile of the times, because other work on the machine only ever adds to one."""
        times = sorted(seconds for made, seconds in self._newest if made == kind)
        return times[(len(times) - 1) // 4]
