"""Adds auxiliary losses (load balancing, draft heads) to the loss of a micro-batch.

``Output.aux`` holds sums over a micro-batch. They are divided by the number of trained tokens of the whole optimiser step, so
that the total does not depend on the split into micro-batches. Every trainer calls ``with_auxiliary`` between loss and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.contracts.trainer import Loss, Output
from miles_core.data.batch import Batch


def trained_tokens(batch: Batch, sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the number of trained tokens of a whole step, at least 1.

    Args:
        batch: one rank's samples of the step.
        sum: reduction over data-parallel ranks, ``Trainer.sum``.
    """
    return sum((batch.mask != 0).sum()).clamp(min=1)


def with_auxiliary(share: Loss, output: Output, tokens: Tensor) -> Loss:
    """Return ``share`` plus the auxiliary losses of ``output``.

    Args:
        share: result of the loss callback.
        output: argument of the loss callback.
        tokens: number of trained tokens of the whole step, over all data-parallel ranks.

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
