"""Settings of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_core.trainer import OptimizerConfig


@dataclass(frozen=True)
class Settings:
    """Settings of the trainer.

    Attributes:
        adamw: settings of the optimizer and the learning rate schedule.
        temperature: sampling temperature of the rollout, applied to log-probs.
        micro_batch_size: samples per micro-batch.
        max_tokens: maximum tokens per micro-batch and rank, instead of ``micro_batch_size``.
        entropy: compute the entropy at trained positions for the loss.
        balance: coefficient of the load-balancing loss; 0 disables it.
        dtype: dtype of parameters and activations.
        longest: tokens of the longest sample.
        model, optimizer, reduction: the user's fields of Megatron-Core's configurations.
    """

    adamw: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    micro_batch_size: int | None = 8
    max_tokens: int | None = None
    entropy: bool = False
    balance: float = 0.0
    dtype: torch.dtype = torch.float32
    longest: int = 4096
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    reduction: Mapping[str, Any] = field(default_factory=dict)
