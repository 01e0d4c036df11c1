"""Settings of the embedded trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_core.train.optimizer import OptimizerConfig


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of the embedded trainer.

    Attributes:
        optimizer: see ``OptimizerConfig``.
        temperature: temperature of the rollout; log-probs refer to the sampled distribution.
        micro_batch_size: samples per micro-batch.
        max_tokens: computed tokens per micro-batch; replaces ``micro_batch_size``.
        share_prompts: compute the common beginning of a group's samples once.
        recompute: recompute the layers' activations in the backward pass.
        aux_loss_coef: coefficient of the load-balancing loss; 0 disables it.
        entropy: provide the loss with the entropy at trained positions.
        trains: False for a frozen model, which has no optimizer.
        offload_optimizer: keep masters and optimizer state in host memory between optimizer steps.
        loss_scale: initial scale and window of ``LossScale``, for FP16 models.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    micro_batch_size: int | None = 8
    max_tokens: int | None = None
    share_prompts: bool = True
    recompute: bool = False
    aux_loss_coef: float = 0.0
    entropy: bool = False
    trains: bool = True
    offload_optimizer: bool = False
    loss_scale: tuple[float, int] = (2.0**16, 2000)
