"""Auxiliary losses (load balancing, draft heads) joined to a micro-batch's share of the loss.

``Output.aux`` holds sums over a micro-batch; what makes their total independent of the split is one normaliser for the
whole optimiser step, the number of trained tokens. Every trainer's schedule calls ``with_auxiliary`` between loss and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.contracts.trainer import Loss, Output
from miles_core.data.batch import Batch


def trained_tokens(batch: Batch, sum: Callable[[Tensor], Tensor]) -> Tensor:
    """How many tokens of a whole step are trained on; at least 1.

    Args:
        batch: one rank's samples of the step.
        sum: over data-parallel ranks, ``Trainer.sum``.
    """
    return sum((batch.mask != 0).sum()).clamp(min=1)


def with_auxiliary(share: Loss, output: Output, tokens: Tensor) -> Loss:
    """``share`` plus the auxiliary losses of ``output``.

    Args:
        share: what the loss callback returned.
        output: what it was given.
        tokens: trained tokens of the whole step, over all data-parallel ranks.

    Returns:
        The sum, with each auxiliary loss as metric ``train/<name>`` (its mean over the step's trained tokens).
    """
    if not output.aux:
        return share
    value, metrics = share.value, dict(share.metrics)
    for name, (total, weight) in output.aux.items():
        value = value + total / tokens.to(total.device)
        metrics[f"train/{name}"] = (total.detach(), torch.as_tensor(weight).detach())
    return Loss(value, metrics)
