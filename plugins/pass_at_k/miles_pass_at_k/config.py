"""Options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class PassAtKConfig:
    """Further metrics of evaluations."""

    pass_at: tuple[int, ...] = option(
        (), flag="--eval-pass-at", help="report pass@k for these k", metavar="K,...", ge=1, enables=True
    )
    majority_at: tuple[int, ...] = option(
        (), flag="--eval-majority-at", help="report majority@k for these k", metavar="K,...", ge=1, enables=True
    )
    answer_key: str | None = option(
        None,
        flag="--eval-answer-key",
        help="entry of a sample's metadata with the answer that majority@k compares (default: the last \\boxed{...}, else the last line)",
    )
    subset_key: str | None = option(
        None,
        flag="--eval-subset-key",
        help="entry of a row's metadata; metrics are also reported for each of its values",
        enables=True,
    )
    patience: int | None = option(
        None,
        flag="--early-stop-after",
        help="stop after this many evaluations without a new best value of --early-stop-metric",
        ge=1,
        enables=True,
    )
    metric: str = option(
        "eval/accuracy", flag="--early-stop-metric", help="the metric of early stopping, which should rise"
    )
