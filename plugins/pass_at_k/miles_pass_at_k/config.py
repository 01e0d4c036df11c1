"""Options of the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import ConfigError, option


@dataclass(frozen=True, kw_only=True)
class PassAtKConfig:
    """Further metrics of evaluations."""

    pass_at: tuple[int, ...] = option(
        (),
        flag="--eval-pass-at",
        help="report pass@k for these k",
        metavar="K,...",
        ge=1,
        enables=True,
        only_if="evaluation.prompt_data",
    )
    majority_at: tuple[int, ...] = option(
        (),
        flag="--eval-majority-at",
        help="report majority@k for these k",
        metavar="K,...",
        ge=1,
        enables=True,
        only_if="evaluation.prompt_data",
    )
    answer_key: str | None = option(
        None,
        flag="--eval-answer-key",
        help="entry of a sample's metadata with the answer that majority@k compares (default: the last \\boxed{...}, else the last line)",
        only_if="pass_at_k.majority_at",
    )
    subset_key: str | None = option(
        None,
        flag="--eval-subset-key",
        help="entry of a row's metadata; metrics are also reported for each of its values",
        enables=True,
        only_if="evaluation.prompt_data",
    )
    patience: int | None = option(
        None,
        flag="--early-stop-after",
        help="stop after this many evaluations without a new best value of --early-stop-metric",
        ge=1,
        enables=True,
        only_if="evaluation.prompt_data",
    )
    metric: str = option(
        "eval/accuracy",
        flag="--early-stop-metric",
        help="the metric of early stopping, which should rise",
        only_if="pass_at_k.patience",
    )
    keep_best: str | None = option(
        None,
        flag="--keep-best",
        help="keep the checkpoint with the best value of this evaluation metric in RUN/best, whatever --keep deletes",
        metavar="METRIC",
        enables=True,
        only_if="evaluation.prompt_data",
    )
    keep_best_mode: Literal["max", "min"] = option(
        "max",
        flag="--keep-best-mode",
        help="whether the best value is the largest or the smallest",
        only_if="pass_at_k.keep_best",
    )


def check_metric(flag: str, name: str, metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has reported a metric.

    Args:
        flag: the option that names it.
        name: the metric.
        metrics: metrics of a step.

    Raises:
        ConfigError: an evaluation belongs to the step, and lacks the metric.
    """
    reported = [each for each in metrics if each.startswith("eval/") or "/eval/" in each]
    if reported and name not in metrics:
        raise ConfigError(f"{flag} {name}: evaluations report {', '.join(sorted(reported))}; choose one of these")
