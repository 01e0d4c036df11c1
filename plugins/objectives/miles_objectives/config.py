"""Options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option
from miles_objectives.presets import PRESETS

ESTIMATORS = ("gmpo", "sapo", "dppo", "dro", "gdpo")
#: Samples; the published code of arXiv 1909.08593.
HORIZON = 10_000
#: DPPO: threshold of each divergence, from verl's examples/dppo_trainer.
THRESHOLDS = {"tv": 0.15, "kl": 0.05}


@dataclass(frozen=True, kw_only=True)
class ObjectivesConfig:
    """Presets of published algorithms, further policy losses, and several rewards per sample."""

    preset: str | None = option(
        None,
        flag="--preset",
        help="a published algorithm: sets its options to the paper's values, which miles plan lists",
        choices=tuple(PRESETS),
        enables=True,
    )
    gmpo_clip: float = option(
        0.4,
        flag="--gmpo-clip",
        help="GMPO: bound of the log-ratio of a token, in the direction of its advantage",
        gt=0,
        only_if="algorithm.advantage_estimator == gmpo",
    )
    sapo_tau_positive: float = option(
        1.0,
        flag="--sapo-tau-positive",
        help="SAPO: temperature of the gate for positive advantages",
        gt=0,
        only_if="algorithm.advantage_estimator == sapo",
    )
    sapo_tau_negative: float = option(
        1.05,
        flag="--sapo-tau-negative",
        help="SAPO: temperature of the gate for negative advantages",
        gt=0,
        only_if="algorithm.advantage_estimator == sapo",
    )
    dppo_divergence: Literal["tv", "kl"] = option(
        "tv",
        flag="--dppo-divergence",
        help="DPPO: binary divergence between the policies: total variation or KL",
        only_if="algorithm.advantage_estimator == dppo",
    )
    dppo_threshold: float | None = option(
        None,
        flag="--dppo-threshold",
        help="DPPO: divergence beyond which a token no longer moves away (default: "
        f"{', '.join(f'{value:g} with {name}' for name, value in THRESHOLDS.items())})",
        gt=0,
        only_if="algorithm.advantage_estimator == dppo",
    )
    dro_beta: float = option(
        0.05,
        flag="--dro-beta",
        help="DRO: coefficient of the squared log-ratio",
        gt=0,
        only_if="algorithm.advantage_estimator == dro",
    )
    kl_target: float | None = option(
        None,
        flag="--kl-target",
        help="adapt --kl-coef or --kl-loss-coef until the mean KL to the reference model, in nats per token, has this value",
        gt=0,
        enables=True,
    )
    kl_horizon: int = option(
        HORIZON,
        flag="--kl-horizon",
        help="samples in which an error of 20 % changes that coefficient by 20 %",
        ge=1,
        only_if="objectives.kl_target",
    )
    gdpo_rewards: tuple[str, ...] = option(
        (),
        flag="--gdpo-rewards",
        help="GDPO: the entries of a dict reward to normalise separately, each with a weight (default 1)",
        metavar="NAME[=WEIGHT],...",
        only_if="algorithm.advantage_estimator == gdpo",
    )
