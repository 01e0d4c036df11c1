"""Options of the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.plugin import option

#: Weight of the value loss next to the policy loss if both train one trunk (the default of the published code of arXiv 1909.08593).
VALUE_LOSS_COEF = 0.1
#: Optimizer steps of a critic of its own on a rollout from which its policy learns in one step. A critic does not need samples of the newest
#: policy, so it may take more and smaller steps: 12 in Open-Reasoner-Zero (arXiv 2503.24290), 9 passes in Phasic Policy Gradient (arXiv 2009.04416).
CRITIC_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """PPO: a critic next to each policy."""

    trunk: Literal["own", "policy"] = option(
        "own",
        flag="--critic-trunk",
        help="own: the critic is a second model with its own weights; policy: it is a value head on the policy's last hidden states",
    )
    checkpoint: str | None = option(
        None,
        flag="--critic-load",
        help="Hugging Face checkpoint from which the critic starts (default: the policy's)",
        metavar="DIR",
        only_if="ppo.trunk == own",
    )
    lr: float = option(1e-5, flag="--critic-lr", help="learning rate of the critic", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", flag="--critic-lr-decay-style", help="learning rate of the critic after its warm-up"
    )
    lr_warmup_iters: int = option(
        0, flag="--critic-lr-warmup-iters", help="optimiser steps of linear warm-up of the critic's learning rate", ge=0
    )
    min_lr: float = option(
        0.0,
        flag="--critic-min-lr",
        help="learning rate of the critic at the end of the decay",
        ge=0,
        only_if="ppo.lr_schedule != constant",
    )
    optimizer: str | None = option(
        None,
        flag="--critic-optimizer",
        help="optimizer of the critic (default: --optimizer)",
        choices=("adamw", "adam", "*"),
        part="optimizer",
        only_if="ppo.trunk == own",
    )
    weight_decay: float | None = option(
        None, flag="--critic-weight-decay", help="weight decay of the critic (default: --weight-decay)", ge=0
    )
    clip_grad: float | None = option(
        None, flag="--critic-clip-grad", help="clip the norm of the critic's gradient (default: --clip-grad)", ge=0
    )
    steps_per_rollout: int | None = option(
        None,
        flag="--critic-steps-per-rollout",
        help=f"optimiser steps of the critic per rollout step (default: {CRITIC_STEPS}, or the policy's if it makes several)",
        ge=1,
        only_if="ppo.trunk == own",
    )
    only_steps: int = option(
        0,
        flag="--num-critic-only-steps",
        aliases=("--critic-warmup-steps",),
        help="number of initial steps in which only the critic learns",
        ge=0,
    )
    value_loss_coef: float | None = option(
        None,
        flag="--value-loss-coef",
        help=f"weight of the value loss next to the policy loss with --critic-trunk policy (default: {VALUE_LOSS_COEF:g})",
        gt=0,
        only_if="ppo.trunk == policy",
    )
    detach_trunk: bool = option(
        False,
        flag="--critic-detach-trunk",
        help="with --critic-trunk policy, the value loss trains the head alone and leaves the trunk to the policy loss",
        only_if="ppo.trunk == policy",
    )

    def overrides(self, several: bool) -> Mapping[str, Any]:
        """Return the options of core that differ between a critic of its own and its policy, by path.

        Args:
            several: whether the policy makes several optimizer steps per rollout step.
        """
        found: dict[str, Any] = {
            "train.lr": self.lr,
            "train.lr_schedule": self.lr_schedule,
            "train.lr_warmup_iters": self.lr_warmup_iters,
            "train.min_lr": self.min_lr,
        }
        if self.lr_schedule == "constant":
            found["train.lr_decay_iters"] = None
        if self.optimizer is not None:
            found["train.optimizer"] = self.optimizer
        if self.weight_decay is not None:
            found["train.weight_decay"] = self.weight_decay
        if self.clip_grad is not None:
            found["train.clip_grad"] = self.clip_grad
        if steps := self.steps_per_rollout or (None if several else CRITIC_STEPS):
            found |= {"train.num_steps_per_rollout": steps, "train.global_batch_size": None}
        if self.checkpoint is not None:
            found |= {"model.hf_checkpoint": self.checkpoint, "model.ref_load": None}
        return found
