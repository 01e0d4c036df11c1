"""What a request is told about its drafts: counts and seconds in its row's metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class Ledger:
    """Keeps the metrics of rows.

    Args:
        most: tokens drafted a step at most.
        profile: seconds of drafting and verifying too.
    """

    def __init__(self, most: int, profile: bool = False) -> None:
        names = [
            "decode_steps",
            "lookahead",
            "draft_steps",
            "drafted",
            "decode_seconds",
            "compared_seconds",
            "plain_seconds",
        ]
        names += ["draft_seconds", "verify_seconds"] if profile else []
        self._empty = dict.fromkeys([*names, *(f"{w}_{d + 1}" for w in ("tried", "kept") for d in range(most))], 0.0)

    def begin(self, row: Any) -> None:
        """A row runs (again)."""
        row.metrics.update(self._empty | row.metrics)

    def count(
        self, rows: Sequence[Any], k: int, drafted: Sequence[int], kept: Sequence[int], apart: Collection[Any] = ()
    ) -> tuple[list[int], list[int]]:
        """A step with k drafts: ``drafted[i]`` of row i counted and ``kept[i]`` were kept. Returns how many rows tried, and kept, each depth,
        those ``apart`` left out."""
        tried, held = [0] * k, [0] * k
        for row, many, few in zip(rows, drafted, kept, strict=True):
            metrics = row.metrics
            metrics["decode_steps"] += 1
            metrics["lookahead"] += k
            if not many:
                continue
            metrics["drafted"] += many
            metrics["draft_steps"] += 1
            told = row not in apart
            for depth in range(many):
                tried[depth] += told
                held[depth] += told and depth < few
                metrics[f"tried_{depth + 1}"] += 1
                metrics[f"kept_{depth + 1}"] += depth < few
        return tried, held

    def spend(
        self, rows: Sequence[Any], seconds: float, plain: float | None, kept: Sequence[int], **parts: float
    ) -> None:
        """The step took so long. ``plain``: what one without drafts takes, where that is known; ``parts`` of the seconds, by name."""
        share = 1 / len(rows)
        for row, few in zip(rows, kept, strict=True):
            row.metrics["decode_seconds"] += seconds * share
            if plain is not None:
                row.metrics["compared_seconds"] += seconds * share
                row.metrics["plain_seconds"] += (few + 1) * plain * share
            for name, part in parts.items():
                row.metrics[f"{name}_seconds"] += part * share
