"""What ``--advantage-estimator`` and ``--loss-aggregation`` choose from."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from miles_core.algorithm.cispo import CISPO
from miles_core.algorithm.dapo import token_mean
from miles_core.algorithm.dr_grpo import DR_GRPO, constant
from miles_core.algorithm.grpo import GRPO, rollout_mean
from miles_core.algorithm.gspo import GSPO
from miles_core.algorithm.objective import Objective, local_sum
from miles_core.algorithm.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from miles_core.algorithm.rloo import RLOO
from miles_core.errors import ConfigError

#: ``--advantage-estimator`` -> objective; plugins provide others with ``make_advantage``.
ALGORITHMS: dict[str, Objective] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "rloo": RLOO,
    "gspo": GSPO,
    "cispo": CISPO,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
    "reinforce_plus_plus_baseline": REINFORCE_PLUS_PLUS_BASELINE,
}
REDUCTIONS = ("rollout_mean", "token_mean", "constant")


def loss_weights(
    mask: Tensor,
    lengths: Tensor,
    rollout: Tensor,
    how: str = "rollout_mean",
    constant_length: int | None = None,
    sum: Callable[[Tensor], Tensor] = local_sum,
) -> Tensor:
    """Compute the weight of every token in the loss of an optimizer step, float32 [tokens]; masked tokens have weight 0.

    The weights depend on all local tokens of the step, so the loss does not depend on how the batch is split or packed: token losses times
    weights are summed over micro-batches and ranks, and gradients are summed, never averaged.

    Siblings (samples with the same rollout id) count as one rollout. A completely masked rollout contributes no loss but counts in the
    number of rollouts, so masking it never increases the weight of others. The same holds for tokens that a correction rejects, because
    ``mask`` is the original mask. Without any unmasked token all weights are 0.

    Args:
        mask: [tokens] flat column of all local samples of the step.
        lengths: [samples] int64.
        rollout: [samples] int64 rollout ids. Siblings must be on one rank; ids must not repeat between ranks.
        how: one of ``REDUCTIONS``.
        constant_length: length in tokens for ``constant``; usually the maximum response length.
        sum: sums a tensor over the ranks of the step.
    """
    if how == "rollout_mean":
        return rollout_mean(mask, lengths, rollout, sum)
    if how == "token_mean":
        return token_mean(mask, sum)
    if how == "constant":
        return constant(mask, rollout, constant_length, sum)
    raise ConfigError(f"unknown loss reduction {how!r}; choose one of {', '.join(REDUCTIONS)}")
