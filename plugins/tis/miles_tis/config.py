"""The options of tis."""

from dataclasses import dataclass
from typing import Literal

from miles_core.config import option


@dataclass(frozen=True, kw_only=True)
class TisConfig:
    """Importance weights w = exp(log p_train - log p_rollout), bounded. TIS and MIS are modes of one correction."""

    use: bool = option(False, flag="--use-tis", help="enable the plugin", enables=True)
    threshold: float | None = option(
        None, flag="--tis-threshold", help="bound weights to [min(T, 1/T), max(T, 1/T)]; truncate uses the upper end"
    )
    clip: float = option(2.0, flag="--tis-clip", help="upper bound of a weight")
    clip_low: float = option(0.0, flag="--tis-clip-low", help="lower bound of a weight")
    level: Literal["token", "sequence", "geometric"] = option(
        "token",
        flag="--tis-level",
        help="what a weight belongs to: a token, or a sequence by product or geometric mean",
    )
    mode: Literal["truncate", "clip", "mask"] = option(
        "truncate", flag="--tis-mode", help="truncate: cut at the upper bound; clip: at both; mask: weight 0 outside"
    )
    veto: bool = option(False, flag="--tis-veto", help="drop a sequence with any token ratio below 1e-4")
    batch_normalize: bool = option(
        False, flag="--tis-batch-normalize", help="divide weights by their mean over the whole optimiser step"
    )
    metrics_only: bool = option(
        False, flag="--get-mismatch-metrics", help="report the metrics and leave the loss untouched", enables=True
    )
