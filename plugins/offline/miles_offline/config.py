"""Options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Training on data that exists: supervised, and on preferences."""

    held_out: str | None = option(
        None,
        flag="--held-out-data",
        help="rows in the layout of --prompt-data whose loss is measured and never trained on",
        metavar="FILE",
        only_if="offline.held_out_interval",
    )
    held_out_interval: int | None = option(
        None,
        flag="--held-out-interval",
        help="measure it before the first and after every N steps, and after the last",
        metavar="N",
        ge=1,
        only_if="offline.held_out",
    )
    kto_desirable_weight: float = option(
        1.0,
        flag="--kto-desirable-weight",
        help="KTO: weight of the loss of answers with the label true",
        gt=0,
        only_if="algorithm.advantage_estimator == kto",
    )
    kto_undesirable_weight: float = option(
        1.0,
        flag="--kto-undesirable-weight",
        help="KTO: weight of the loss of answers with the label false",
        gt=0,
        only_if="algorithm.advantage_estimator == kto",
    )
    center_rewards_coefficient: float = option(
        0.0,
        flag="--center-rewards-coefficient",
        help="reward_model: weight of the squared sum of the two scores of a pair, which keeps their mean near 0",
        metavar="A",
        ge=0,
        only_if="algorithm.advantage_estimator == reward_model",
    )
