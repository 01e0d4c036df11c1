"""RLOO: REINFORCE leave-one-out (arXiv 2402.14740).

The baseline of a rollout is the mean reward of the other n - 1 rollouts of its prompt. For every trained token of rollout i:

    advantage              A_i = R_i - mean of the other R = (R_i - mean R) n / (n - 1)
    ratio, loss, weights   as in GRPO; the paper has a single optimizer step per rollout, where all ratios are 1
"""

from __future__ import annotations

from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.objective import AdvantageInputs, Groups, Objective, on_trained_tokens


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute R minus the mean of the other rollouts of the group on every trained token, [tokens]."""
    groups = Groups.of(inputs)
    return on_trained_tokens(inputs, groups.scores(groups.centred * (groups.n / (groups.n - 1).clamp(min=1))))


RLOO = Objective(advantage, grpo.policy_loss)
