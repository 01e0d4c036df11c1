"""Chooses the number of draft tokens per step: fixed, or the number with the highest measured throughput.

A step with k drafts emits 1 + a_1 + ... + a_k tokens per row, where a_d is the share of steps whose first d drafts are accepted. Its cost is
measured by trials, in units of a step without drafts, for each number of drafts and each batch size. The best k has the most tokens per
cost. k = 0 is plain decoding and is chosen unless drafting is faster by more than the factor ``_GAIN``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_speculative.acceptance import Acceptance
from miles_speculative.config import MOST
from miles_speculative.costs import Costs

#: Drafting must be faster by this factor.
_GAIN = 1.05
#: While drafting is off, trials may cost this share of the generated tokens.
_SHARE = 0.003
#: Steps between trials: the initial number, which doubles while the decision to draft or not stays the same, and its maximum.
_AGAIN, _SELDOM = 16, 512
#: Between trials, the choice is updated every this many steps.
_EVERY = 8
#: The draft starts to process prompts again when this many steps or fewer remain until the next trials.
_AHEAD = 256


class Lookahead:
    """A fixed number of draft tokens.

    Args:
        k: draft tokens per step.
        plain: run every ``plain``-th step without drafts, to measure its cost; 0 means never.
    """

    def __init__(self, k: int, plain: int = 0) -> None:
        self.k = self.most = k
        self.plain = plain
        self.steps = 0
        self.acceptance = Acceptance(k)
        self.costs: dict[int, Costs] = {}

    def choose(self, rows: int) -> int:
        """Return the number of tokens to draft for a batch of ``rows`` rows."""
        self.steps += 1
        return 0 if self.plain and self.steps % self.plain == 0 else self.k

    @property
    def rests(self) -> bool:
        """Whether some steps may run without drafts."""
        return self.plain > 0

    @property
    def idle(self) -> bool:
        """Whether rows that join now will probably not use drafts, at this batch size or at smaller sizes that were tried."""
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
        """Record a step.

        Args:
            rows: batch size.
            k: number of drafts.
            seconds: duration of the step.
            steady: whether the duration is representative.
            tried: ``tried[d]``: number of rows with more than d drafts.
            kept: ``kept[d]``: number of these rows that accepted more than d drafts.
        """
        self.acceptance.add(tried, kept)
        if steady:
            size = rows.bit_length()
            if size not in self.costs:
                self.costs[size] = Costs()
            self.costs[size].add(k, seconds)

    def plain_seconds(self, rows: int) -> float | None:
        """Return the seconds of a step without drafts; None if not measured."""
        costs = self.costs.get(rows.bit_length())
        return None if costs is None else costs.plain


class Auto(Lookahead):
    """Chooses the number of draft tokens from measurements during the run."""

    def __init__(self, most: int = MOST // 2) -> None:
        super().__init__(most)
        self.size = 0
        #: batch size (bit length) -> its trials
        self.trials: dict[int, Trials] = {}

    @property
    def rests(self) -> bool:
        return True

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
                trials.queue = self._plan_trials(costs)
        if trials.queue:
            trials.chosen, trials.made = trials.queue.pop(0), True
        elif trials.chosen not in costs.known or trials.left % _EVERY == 0:
            trials.chosen = self.best(costs)
        return trials.chosen

    def best(self, costs: Costs, least: int = 0, apart: int = 0) -> int:
        """Return the k with the most tokens per cost, from 1 to one more than the largest tried; 0 if drafting is not faster.

        least: 1 to exclude 0. apart: a k to exclude."""
        most = min(max(costs.known) + 1, self.most)
        rates = {k: self.acceptance.length(k) / costs.of(k) for k in range(1, most + 1) if k != apart}
        best = max(rates, key=rates.__getitem__, default=apart)
        return best if least or rates[best] >= _GAIN else 0

    def _begin(self) -> None:
        """Start with a new batch size; the costs of the nearest known size are the first guess."""
        nearest = min(self.costs, key=lambda known: abs(known - self.size), default=None)
        costs = self.costs[self.size] = Costs(None if nearest is None else self.costs[nearest].known)
        # the first step of each kind is not counted; plain steps cost nothing extra
        self.trials[self.size] = Trials([*[0] * 4, *[self.best(costs, least=1)] * 3])

    def _plan_trials(self, costs: Costs) -> list[int]:
        """Return the numbers of drafts to try again.

        While drafting: another number of drafts, and plain steps. Otherwise: drafts; the first of these steps is not representative,
        because the draft has more tokens to process."""
        best = self.best(costs)
        return [*[self.best(costs, least=1, apart=best)] * 2, 0, 0] if best else [self.best(costs, least=1)] * 3

    def _finish(self, costs: Costs, trials: Trials) -> None:
        """End the trials: choose the best number and schedule the next trials."""
        best, before = self.best(costs), trials.best
        same = before is not None and (best > 0) == (before > 0)
        trials.wait = trials.left = min(2 * trials.wait, _SELDOM) if same else _AGAIN
        if same and not best:
            trials.left = max(trials.wait, int(trials.lost / _SHARE))
        trials.best = trials.chosen = best
        trials.made, trials.lost = False, 0.0


@dataclass
class Trials:
    """Trials of one batch size.

    Attributes:
        queue: numbers of drafts still to try.
        made: whether trials are in progress.
        lost: cost of drafting so far beyond plain decoding of the same tokens, in plain steps.
        left: steps until the next trials.
        wait: steps between the last trials and the next.
        best: the best number in the last trials.
        chosen: the number in use.
    """

    queue: list[int]
    made: bool = False
    lost: float = 0.0
    left: int = _AGAIN
    wait: int = _AGAIN
    best: int | None = None
    chosen: int = 0
