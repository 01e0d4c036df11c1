"""Options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option

#: Defaults of Muon's options: momentum as in torch.optim.Muon, and the update size with which AdamW's learning rates carry over.
MOMENTUM, ADJUST = 0.95, "match_rms_adamw"


@dataclass(frozen=True, kw_only=True)
class OptimizersConfig:
    """Further optimizers."""

    muon_lr: float | None = option(
        None,
        flag="--muon-lr",
        help="peak learning rate of the matrices that Muon steps (default: --lr); same schedule as --lr, which the others have",
        gt=0,
        enables=True,
        only_if="train.optimizer == muon",
    )
    muon_momentum: float = option(
        MOMENTUM,
        flag="--muon-momentum",
        help="decay of Muon's momentum",
        ge=0,
        lt=1,
        enables=True,
        only_if="train.optimizer == muon",
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = option(
        ADJUST,
        flag="--muon-adjust-lr",
        help="size of Muon's update of a matrix [a, b], in learning rates: match_rms_adamw, 0.2 sqrt(max(a, b)), as large as AdamW's; "
        "original, sqrt(max(1, a / b))",
        enables=True,
        only_if="train.optimizer == muon",
    )
