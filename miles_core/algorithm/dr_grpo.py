"""Dr.GRPO: GRPO done right (arXiv 2503.20783, section 3.2).

GRPO's division by the standard deviation favours questions whose answers are all right or all wrong, and its mean over a rollout favours
long wrong answers. Both are left out. For every trained token t of rollout i, with the longest response of M tokens:

    advantage       A_i = R_i - mean R
    ratio, loss     r_t and L_t as in GRPO
    normalization   w_t = 1 / (M * rollouts of the step)           ``--loss-aggregation constant``; M is ``--loss-constant-length``
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.objective import AdvantageInputs, Groups, Objective, local_sum, on_trained_tokens
from miles_core.errors import ConfigError


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute R - mean on every trained token, [tokens]."""
    groups = Groups.of(inputs)
    return on_trained_tokens(inputs, groups.scores(groups.centred))


def constant(mask: Tensor, rollout: Tensor, length: int | None, sum: Callable[[Tensor], Tensor] = local_sum) -> Tensor:
    """Compute the weight of each token, ``--loss-aggregation constant``; arguments as for ``choices.loss_weights``."""
    if length is None or length < 1:
        raise ConfigError(f"the constant loss reduction needs a length of at least 1 token, got {length}")
    count = float(len(torch.unique(rollout)))
    rollouts = sum(torch.tensor(count, dtype=torch.float64, device=mask.device)).clamp(min=1.0)
    return (mask.bool().double() / (length * rollouts)).float()


DR_GRPO = Objective(advantage, grpo.policy_loss)
