"""Settings of AdamW from core's options, for every trainer, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from miles_core.train.data_shard import step_count

if TYPE_CHECKING:
    from miles_core.config.config import Config


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and of its learning-rate schedule.

    Attributes:
        lr: peak learning rate.
        schedule: decay after the linear warm-up.
        warmup_steps: number of warm-up steps; warm-up step s (from 0) uses ``lr * (s + 1) / warmup_steps``.
        decay_steps: optimiser steps, including warm-up, until ``min_lr`` is reached.
        min_lr: final learning rate of the decay.
        weight_decay: decoupled weight decay; not applied to biases, norms and other 1-D parameters.
        betas, eps: coefficients of the moment estimates.
        clip_grad: maximum global norm of the gradient; 0 disables clipping.
    """

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    min_lr: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    clip_grad: float = 1.0

    @classmethod
    def of(cls, config: Config) -> OptimizerConfig:
        """Build the settings from a run's options. Unless ``--lr-decay-iters`` is set, the decay ends with the run."""
        train, rollout = config.train, config.rollout
        steps = rollout.num_rollout * step_count(rollout.batch_size * rollout.n_samples_per_prompt, train)
        return cls(
            lr=train.lr,
            schedule=train.lr_schedule,
            warmup_steps=train.lr_warmup_iters,
            decay_steps=train.lr_decay_iters or steps,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            clip_grad=train.clip_grad,
        )

    def with_settings(self, settings: Mapping[str, float]) -> OptimizerConfig:
        """Return a copy with other settings, named as the options of ``--help train`` are (``Trainer.configure``)."""
        betas = (settings.get("adam_beta1", self.betas[0]), settings.get("adam_beta2", self.betas[1]))
        own = {name: value for name, value in settings.items() if not name.startswith("adam_")}
        return replace(self, **own, betas=betas, eps=settings.get("adam_eps", self.eps))  # type: ignore[arg-type]

    def rate(self, step: int) -> float:
        """Return the learning rate of optimiser step ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup_steps) / max(self.decay_steps - self.warmup_steps, 1), 1.0)
        remaining = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * remaining
