"""The options of the plugin."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option

#: Condition under which weights are computed: to change the loss, or for metrics (``TisConfig.compares``).
_WEIGHTS = "(tis.use or tis.metrics_only or not tis.opsm)"
_REJECTS = "tis.reject != none"


@dataclass(frozen=True, kw_only=True)
class TisConfig:
    """Importance weights w = exp(log p_train - log p_rollout), bounded. TIS and MIS are modes of one correction."""

    use: bool = option(False, flag="--use-tis", help="enable the plugin, with importance weights", enables=True)
    threshold: float | None = option(
        None,
        flag="--tis-threshold",
        help="bound weights to [min(T, 1/T), max(T, 1/T)]; truncate uses the upper end",
        gt=0,
        only_if=_WEIGHTS,
    )
    clip: float = option(
        2.0, flag="--tis-clip", help="upper bound of a weight", ge=1, only_if=f"not tis.threshold and {_WEIGHTS}"
    )
    clip_low: float = option(
        0.0,
        flag="--tis-clip-low",
        help="lower bound of a weight",
        ge=0,
        le=1,
        only_if=f"not tis.threshold and tis.mode != truncate and {_WEIGHTS}",
    )
    level: Literal["token", "sequence", "geometric"] = option(
        "token",
        flag="--tis-level",
        help="level of weights: per token, or per sequence with the product or geometric mean of its ratios",
        only_if=_WEIGHTS,
    )
    mode: Literal["truncate", "clip", "mask"] = option(
        "truncate",
        flag="--tis-mode",
        help="truncate: cut at the upper bound; clip: at both; mask: weight 0 outside",
        only_if=_WEIGHTS,
    )
    reject: Literal["none", "token", "sequence", "geometric"] = option(
        "none",
        flag="--tis-reject",
        help="also give weight 0 to tokens, or to sequences (product or geometric mean), whose ratio is outside the reject bounds",
        only_if=_WEIGHTS,
    )
    reject_high: float | None = option(
        None, flag="--tis-reject-high", help="upper bound of --tis-reject", ge=1, only_if=_REJECTS
    )
    reject_low: float | None = option(
        None, flag="--tis-reject-low", help="lower bound of --tis-reject", ge=0, le=1, only_if=_REJECTS
    )
    veto: bool = option(
        False, flag="--tis-veto", help="drop a sequence with any token ratio below 1e-4", only_if=_WEIGHTS
    )
    batch_normalize: bool = option(
        False,
        flag="--tis-batch-normalize",
        help="divide weights by their mean over the whole optimiser step",
        only_if=_WEIGHTS,
    )
    opsm: bool = option(
        False,
        flag="--use-opsm",
        help="drop tokens with negative advantage in off-policy sequences (--opsm-delta); enables the plugin, without importance "
        "weights unless --use-tis is given too",
        enables=True,
    )
    opsm_delta: float = option(
        1e-4,
        flag="--opsm-delta",
        help="a sequence is off-policy if mean(log p_old - log p) is above this",
        ge=0,
        only_if="tis.opsm",
    )
    metrics_only: bool = option(
        False,
        flag="--get-mismatch-metrics",
        help="enable the plugin and report its metrics; the loss is unchanged unless --use-tis or --use-opsm is given too",
        enables=True,
    )

    @property
    def weighs(self) -> bool:
        """Whether importance weights change the loss: with --use-tis, or if the plugin is enabled without other options."""
        return self.use or not (self.opsm or self.metrics_only)

    @property
    def compares(self) -> bool:
        """Whether the trainer's old log-probabilities are compared with the engine's."""
        return self.weighs or self.metrics_only
