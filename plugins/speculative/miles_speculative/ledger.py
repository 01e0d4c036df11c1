"""Records draft counts and seconds in the metrics of each request's row.

Values that are the same for all rows of a step are accumulated once, and a row gets the difference between its end and its start. A step
without drafts therefore has no per-row overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Open:
    """A running row.

    Attributes:
        start: the sums when the row began.
        steps: (drafted, kept) -> number of steps.
        plain: estimated seconds that plain steps would have taken for the row's accepted drafts.
    """

    start: dict[str, float]
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    plain: float = 0.0


class Ledger:
    """Records the metrics of rows.

    Args:
        most: maximum number of draft tokens per step.
        profile: also record the seconds of drafting and verifying.
    """

    def __init__(self, most: int, profile: bool = False) -> None:
        names = ["decode_steps", "lookahead", "decode_seconds", "compared_seconds", "plain_seconds"]
        names += ["draft_seconds", "verify_seconds"] if profile else []
        self._sums = dict.fromkeys(names, 0.0)
        own = ["draft_steps", "drafted", *(f"{w}_{d + 1}" for w in ("tried", "kept") for d in range(most))]
        self._empty = dict.fromkeys([*names, *own], 0.0)
        self._open: dict[Any, _Open] = {}

    def begin(self, row: Any) -> None:
        """Start, or resume, a row."""
        self._open[row] = _Open(dict(self._sums))

    def end(self, row: Any) -> None:
        """End a row and add its counts to its metrics."""
        ended = self._open.pop(row, None)
        if ended is None:
            return
        found = self._empty | row.metrics
        for name, value in self._sums.items():
            found[name] += value - ended.start[name]
        found["plain_seconds"] += ended.plain
        for (drafted, kept), steps in ended.steps.items():
            found["draft_steps"] += steps
            found["drafted"] += drafted * steps
            for depth in range(drafted):
                found[f"tried_{depth + 1}"] += steps
                found[f"kept_{depth + 1}"] += steps * (depth < kept)
        row.metrics.update(found)

    def count(
        self, rows: Sequence[Any], k: int, drafted: Sequence[int], kept: Sequence[int], apart: Collection[Any] = ()
    ) -> tuple[list[int], list[int]]:
        """Count a step with k > 0 drafts.

        Args:
            rows: the rows of the step.
            k: number of drafts.
            drafted: number of usable drafts of each row.
            kept: number of accepted drafts of each row.
            apart: rows to exclude from the returned counts.

        Returns:
            for each depth, how many rows tried a draft and how many kept it.
        """
        self._sums["decode_steps"] += 1
        self._sums["lookahead"] += k
        tried, held = [0] * k, [0] * k
        pairs: Counter[tuple[int, int]] = Counter()
        for row, pair in zip(rows, zip(drafted, kept, strict=True), strict=True):
            if pair[0]:
                self._open[row].steps[pair] += 1
                pairs[pair] += row not in apart
        for (many, few), count in pairs.items():
            for depth in range(many):
                tried[depth] += count
                held[depth] += count * (depth < few)
        return tried, held

    def plain(self, rows: int, seconds: float) -> None:
        """Record the seconds of a step without drafts for ``rows`` rows."""
        sums, share = self._sums, seconds / rows
        sums["decode_steps"] += 1
        sums["decode_seconds"] += share
        sums["compared_seconds"] += share
        sums["plain_seconds"] += share

    def spend(
        self, rows: Sequence[Any], seconds: float, plain: float | None, kept: Sequence[int], **parts: float
    ) -> None:
        """Record the seconds of a step with drafts.

        Args:
            rows: the rows of the step.
            seconds: duration of the step.
            plain: estimated seconds of a step without drafts; None if unknown.
            kept: number of accepted drafts of each row.
            parts: seconds of parts of the step, by name.
        """
        share = 1 / len(rows)
        self._sums["decode_seconds"] += seconds * share
        for name, part in parts.items():
            self._sums[f"{name}_seconds"] += part * share
        if plain is None:
            return
        self._sums["compared_seconds"] += seconds * share
        self._sums["plain_seconds"] += plain * share
        for row, few in zip(rows, kept, strict=True):
            if few:
                self._open[row].plain += few * plain * share
