"""Reduces token losses to the loss of an optimiser step.

The reduction is a weight per token, computed before the first micro-batch from all local tokens of the step. The step's loss is then
``(token_loss * weight).sum()``, summed over micro-batches and ranks. It does not depend on how the batch was split or packed, and
gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.algorithm.advantage import local_sum
from miles_core.algorithm.ragged import expand, mask_counts
from miles_core.errors import ConfigError

REDUCTIONS = ("rollout_mean", "token_mean", "constant")


def loss_weights(
    mask: Tensor,
    lengths: Tensor,
    rollout_ids: Tensor,
    how: str = "rollout_mean",
    constant_length: int | None = None,
    sum: Callable[[Tensor], Tensor] = local_sum,
) -> Tensor:
    """Compute the weight of every token in the step's loss, float32 [tokens]; masked tokens have weight 0.

    - ``rollout_mean``: mask / (mask sum of the token's rollout * rollouts of the step).
    - ``token_mean``: mask / (mask sum of the step).
    - ``constant``: mask / (constant_length * rollouts of the step), Dr.GRPO (arXiv 2503.20783).

    Siblings (samples with the same rollout id) count as one rollout. A completely masked rollout contributes no loss but counts in the
    number of rollouts, so masking it never increases the weight of others. The same holds for tokens that a correction rejects, because
    ``mask`` is the original mask. Without any unmasked token all weights are 0.

    Args:
        mask: [tokens] flat column (``ragged``) of all local samples of the step.
        lengths: [samples] int64.
        rollout_ids: [samples] int64. Siblings must be on one rank; ids must not repeat between ranks.
        how: one of ``REDUCTIONS``.
        constant_length: length in tokens for ``constant``; usually the maximum response length.
        sum: sums a tensor over the ranks of the step.
    """
    if how not in REDUCTIONS:
        raise ConfigError(f"unknown loss reduction {how!r}; choose one of {', '.join(REDUCTIONS)}")
    ones = mask.bool().double()
    if how == "token_mean":
        return (ones / sum(ones.sum()).clamp(min=1.0)).float()

    ids, rollout_of = torch.unique(rollout_ids, return_inverse=True)
    rollouts = sum(ones.new_tensor(float(len(ids)))).clamp(min=1.0)
    if how == "constant":
        if constant_length is None or constant_length < 1:
            raise ConfigError(f"the constant loss reduction needs a length of at least 1 token, got {constant_length}")
        return (ones / (constant_length * rollouts)).float()
    # Integer counts: exact in any order of addition.
    counts = torch.zeros(len(ids), dtype=torch.int64, device=mask.device)
    counts = counts.index_add(0, rollout_of.to(mask.device), mask_counts(mask, lengths))
    per_sample = 1.0 / (counts.clamp(min=1).double() * rollouts)
    return (ones * expand(per_sample[rollout_of.to(mask.device)], lengths)).float()


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the detached sum over unmasked tokens and their number: a metric's (sum, weight) for a mean over the step's tokens.

    Values of masked tokens are ignored, even NaN. The number is the sum of ``mask``, which must be 0 or 1.
    """
    return torch.where(mask.bool(), values.detach(), 0.0).sum(), mask.sum()
