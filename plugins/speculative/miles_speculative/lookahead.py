"""How many tokens are drafted a step: a fixed number, or the one that pays best.

What a step emits follows from the acceptance by depth, a_d (the share of steps whose first d drafts are kept): 1 + a_1 + ... + a_k tokens a
row. What it costs is measured, for each number of drafts and size of the batch. The best k has the most tokens a second; 0 is
plain decoding, and k = 0 wins unless drafting is faster by more than the measurement is worth.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from miles_speculative.config import MOST

#: A time is the shortest of the newest ones, so many: what else the machine does only ever adds to it.
_TIMES = 5
#: What a step forgets of the counts of drafts before it; of a batch smaller than this, in proportion less.
_FORGOTTEN, _MANY = 0.04, 4
#: Drafting must be faster by this factor.
_GAIN = 1.03
#: A batch size is measured anew after so many steps, then, while the choice stays the same, after twice as many, up to a limit.
_AGAIN, _SELDOM = 64, 1024
#: Between trials the choice is made again every so many steps.
_EVERY = 8
#: Prompts are worth reading again so many steps before trials are due.
_AHEAD = 256
#: Numbers of drafts that are tried first; the first step of each is not counted.
_FIRST = (0, 0, 1, 1, 3, 3)


class Lookahead:
    """Always the same number.

    Args:
        k: tokens drafted a step.
        plain: every so many steps one without drafts is made, to know what it costs; 0 never.
    """

    def __init__(self, k: int, plain: int = 0) -> None:
        self.k = self.most = k
        self.plain = plain
        self.steps = 0
        self.acceptance = Acceptance(k)
        self.costs: dict[int, Costs] = {}

    def choose(self, rows: int) -> int:
        """Tokens to draft for a batch of ``rows``."""
        self.steps += 1
        return 0 if self.plain and self.steps % self.plain == 0 else self.k

    @property
    def idle(self) -> bool:
        """Whether what joins now will hardly be drafted for, at this size of the batch or, as rows leave, at any smaller one."""
        return False

    def record(self, rows: int, k: int, seconds: float | None, tried: list[int], kept: list[int]) -> None:
        """A step with k drafts was made: ``tried[d]`` rows drafted more than d tokens and ``kept[d]`` of them kept more than d. ``seconds``:
        None where it took other than such steps do."""
        self.acceptance.add(tried, kept)
        if seconds is not None:
            self.costs.setdefault(rows.bit_length(), Costs()).add(k, seconds)

    def plain_seconds(self, rows: int) -> float | None:
        """What a step without drafts costs; None where it was not measured."""
        costs = self.costs.get(rows.bit_length())
        return None if costs is None else costs.seconds.get(0)


class Auto(Lookahead):
    """The number that pays best, measured while the run goes on."""

    def __init__(self, most: int = MOST // 2) -> None:
        super().__init__(most)
        self.size = 0

    @property
    def idle(self) -> bool:
        smaller = [self.costs.get(size) for size in range(1, self.size + 1)]
        return bool(smaller) and all(
            c is not None and not c.trials and c.due - c.steps > _AHEAD and c.chosen == 0 for c in smaller
        )

    def choose(self, rows: int) -> int:
        self.size = rows.bit_length()
        costs = self.costs.get(self.size)
        if costs is None:
            costs = self.costs[self.size] = self._begin(self.size)
        costs.steps += 1
        if not costs.trials and costs.steps >= costs.due:
            # what is not in use goes stale: plain steps, and one draft more, while drafting pays; drafts while it does not
            best = self.best(costs)
            costs.trials = [0, 0, best + 1, best + 1] if best else [self.best(costs, least=1)] * 2
            costs.wait = min(2 * costs.wait, _SELDOM) if best == costs.best or not best else _AGAIN
            costs.due, costs.best = costs.steps + costs.wait, best
        if costs.trials:
            costs.chosen = None
            return min(costs.trials.pop(0), self.most)
        if costs.chosen is None or costs.steps % _EVERY == 0 or len(costs.times.get(costs.chosen, ())) < 2:
            costs.chosen = self.best(costs)
        return costs.chosen

    def best(self, costs: Costs, least: int = 0) -> int:
        """The k, at least ``least``, with the most tokens a second; at most one more than was tried, because products of a few rows
        more may take another path and cost much more than those before them."""
        most = min(max(costs.seconds, default=0) + 1, self.most)
        rates = {k: self.acceptance.length(k) / costs.of(k) for k in range(1, most + 1)}
        best = max(rates, key=rates.__getitem__)
        return 0 if not least and rates[best] < _GAIN / costs.of(0) else best

    def _begin(self, size: int) -> Costs:
        """Costs of a batch size that was not seen: those of the nearest one as a first guess."""
        if not self.costs:
            return Costs(trials=list(_FIRST))
        near = min(self.costs, key=lambda known: abs(known - size))
        made = Costs(dict(self.costs[near].seconds))
        made.trials = [0, 0, *[self.best(made, least=1)] * 2] if 0 in made.seconds else list(_FIRST)
        return made


class Acceptance:
    """How often a draft is kept if the one before it was, by depth.

    Old steps count less, at every depth, so that a depth which is no longer tried comes to be judged by the one before it, and is tried
    again when that one became better.
    """

    def __init__(self, most: int) -> None:
        self.reached, self.kept = [0.0] * most, [0.0] * most

    def add(self, tried: list[int], kept: list[int]) -> None:
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


@dataclass
class Costs:
    """Seconds of a step at one batch size.

    Attributes:
        seconds: drafts -> the shortest of the newest times; of another batch size as long as there are none.
        trials: numbers of drafts to be tried next.
        steps, due, wait: steps made, when the next trials are due, and how long that is after the last ones.
        best, chosen: what was best at the last trials, and is in use.
        used: steps in a row with the number in use.
        times: drafts -> the newest times; empty after the first one, which is not counted.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    trials: list[int] = field(default_factory=list)
    steps: int = 0
    due: int = _AGAIN
    wait: int = _AGAIN
    best: int | None = None
    chosen: int | None = None
    used: int = 0
    times: dict[int, deque[float]] = field(default_factory=dict)

    def add(self, k: int, seconds: float) -> None:
        """A step with k drafts took so long. The first of its kind is not counted: it pays for memory and code that the others find.

        What changes the time of the number in use, other work on the machine or longer texts, changes that of the others alike, which
        are not measured meanwhile; without that they would look better one after the other."""
        if k not in self.times:
            self.times[k] = deque(maxlen=_TIMES)
            return
        self.used = self.used + 1 if k == self.chosen else 0
        before = self.seconds.get(k)
        self.times[k].append(seconds)
        self.seconds[k] = min(self.times[k])
        if before is not None and self.used > _TIMES and self.seconds[k] != before:
            self._scale(self.seconds[k] / before, k)

    def _scale(self, factor: float, apart: int) -> None:
        """All times but those of one number of drafts, by this factor."""
        for k in self.seconds.keys() - {apart}:
            self.seconds[k] *= factor
            if k in self.times:
                self.times[k] = deque((t * factor for t in self.times[k]), maxlen=_TIMES)

    def of(self, k: int) -> float:
        """Seconds of a step with k drafts. Where it was not measured, the line of least squares through the steps with drafts; infinite
        as long as there are none."""
        if k in self.seconds:
            return self.seconds[k]
        known = {j: s for j, s in self.seconds.items() if j}
        if not k or not known:
            return float("inf")
        if len(known) == 1 and 0 in self.seconds:
            known[0] = self.seconds[0]
        middle, mean = fmean(known), fmean(known.values())
        spread = sum((j - middle) ** 2 for j in known)
        slope = sum((j - middle) * (s - mean) for j, s in known.items()) / spread if spread else 0.0
        return max(mean + slope * (k - middle), min(known.values()))
