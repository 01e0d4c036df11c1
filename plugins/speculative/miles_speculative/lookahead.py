"""How many tokens are drafted a step: a fixed number, or the one that pays best.

What a step emits follows from the acceptance by depth, a_d (the share of steps whose first d drafts are kept): 1 + a_1 + ... + a_k tokens a
row. What it costs is measured in steps without drafts, for each number of drafts and size of the batch, by trials. The best k has the most
tokens for what it costs; 0 is plain decoding, and k = 0 wins unless drafting is faster by more than the measurement is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_speculative.acceptance import Acceptance
from miles_speculative.config import MOST
from miles_speculative.costs import Costs

#: Drafting must be faster by this factor.
_GAIN = 1.05
#: While nothing is drafted, trials may cost this share of what is generated.
_SHARE = 0.003
#: They come so many steps after the first ones, and as long as drafting pays, or does not, twice as many each time, up to a limit.
_AGAIN, _SELDOM = 16, 512
#: Between trials the choice is made again every so many steps.
_EVERY = 8
#: Prompts are worth reading again so many steps before trials are due.
_AHEAD = 256


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
        """Whether what joins now will hardly be drafted for, at this size of the batch or, as rows leave, at a smaller one that was tried."""
        return False

    def record(
        self,
        rows: int,
        k: int,
        seconds: float,
        steady: bool = True,
        tried: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> None:
        """A step with k drafts was made: ``tried[d]`` rows drafted more than d tokens and ``kept[d]`` of them kept more than d. ``steady``:
        it took as long as such steps do."""
        self.acceptance.add(tried, kept)
        if steady:
            size = rows.bit_length()
            if size not in self.costs:
                self.costs[size] = Costs()
            self.costs[size].add(k, seconds)

    def plain_seconds(self, rows: int) -> float | None:
        """What a step without drafts costs; None where it was not measured."""
        costs = self.costs.get(rows.bit_length())
        return None if costs is None else costs.plain


class Auto(Lookahead):
    """The number that pays best, measured while the run goes on."""

    def __init__(self, most: int = MOST // 2) -> None:
        super().__init__(most)
        self.size = 0
        #: size of the batch, in powers of two -> its trials
        self.trials: dict[int, Trials] = {}

    @property
    def idle(self) -> bool:
        tried = [trials for size, trials in self.trials.items() if size <= self.size]
        return bool(tried) and all(trials.chosen == 0 and trials.left > _AHEAD for trials in tried)

    def record(
        self,
        rows: int,
        k: int,
        seconds: float,
        steady: bool = True,
        tried: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> None:
        super().record(rows, k, seconds, steady, tried, kept)
        if k and (plain := self.plain_seconds(rows)):
            self.trials[rows.bit_length()].lost += seconds / plain - 1 - sum(kept) / rows

    def choose(self, rows: int) -> int:
        self.size = rows.bit_length()
        if self.size not in self.trials:
            self._begin()
        costs, trials = self.costs[self.size], self.trials[self.size]
        trials.left -= 1
        if not trials.queue:
            if trials.made:
                self._finish(costs, trials)
            elif trials.left <= 0:
                trials.queue = self._stale(costs)
        if trials.queue:
            trials.chosen, trials.made = trials.queue.pop(0), True
        elif trials.chosen not in costs.known or trials.left % _EVERY == 0:
            trials.chosen = self.best(costs)
        return trials.chosen

    def best(self, costs: Costs, least: int = 0, apart: int = 0) -> int:
        """The k, at least ``least`` and not ``apart``, with the most tokens for its cost; at most one more than was tried."""
        most = min(max(costs.known) + 1, self.most)
        rates = {k: self.acceptance.length(k) / costs.of(k) for k in range(1, most + 1) if k != apart}
        best = max(rates, key=rates.__getitem__, default=apart)
        return best if least or rates[best] >= _GAIN else 0

    def _begin(self) -> None:
        """A batch size that was not seen: the costs of the nearest one are a first guess."""
        nearest = min(self.costs, key=lambda known: abs(known - self.size), default=None)
        costs = self.costs[self.size] = Costs(None if nearest is None else self.costs[nearest].known)
        # the first step of each kind is not counted, and plain ones are no loss
        self.trials[self.size] = Trials([*[0] * 4, *[self.best(costs, least=1)] * 3])

    def _stale(self, costs: Costs) -> list[int]:
        """What is not in use is tried again: drafts while there are none, of which the first finds more to read than usual and does not count;
        else plain steps, and another number of drafts."""
        best = self.best(costs)
        return [*[self.best(costs, least=1, apart=best)] * 2, 0, 0] if best else [self.best(costs, least=1)] * 3

    def _finish(self, costs: Costs, trials: Trials) -> None:
        """Trials are over: choose, and say when the next ones are due."""
        best, before = self.best(costs), trials.best
        same = before is not None and (best > 0) == (before > 0)
        trials.wait = trials.left = min(2 * trials.wait, _SELDOM) if same else _AGAIN
        if same and not best:
            trials.left = max(trials.wait, int(trials.lost / _SHARE))
        trials.best = trials.chosen = best
        trials.made, trials.lost = False, 0.0


@dataclass
class Trials:
    """Of one batch size. Attributes:
    queue: numbers of drafts to be tried now.
    made: whether some were.
    lost: steps without drafts that would have emitted as much, fewer than these took.
    left, wait: steps until the next ones are due, and how many there were.
    best, chosen: what was best at the last ones, and what is in use.
    """

    queue: list[int]
    made: bool = False
    lost: float = 0.0
    left: int = _AGAIN
    wait: int = _AGAIN
    best: int | None = None
    chosen: int = 0
