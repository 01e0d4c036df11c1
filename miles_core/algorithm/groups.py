"""Rewards compared with those of their group, the rollouts of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.algorithm.objective import AdvantageInputs
from miles_core.data.batch import expand
from miles_core.errors import ConfigError


@dataclass(frozen=True)
class Groups:
    """Statistics of each sample's group, [samples] float64 on the CPU, so that the order of summation is fixed.

    They count a rollout once, independent of its number of siblings; its reward is the mean over the siblings.

    Attributes:
        centred: R - mean.
        std: unbiased standard deviation of the rewards; 0 for a single rollout.
        n: number of rollouts.
        equal: whether all rewards are equal, or n = 1: there is nothing to compare.
    """

    centred: Tensor
    std: Tensor
    n: Tensor
    equal: Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> Groups:
        """Compute the statistics. ValueError if a rollout id occurs in two groups."""
        values = inputs.rewards.detach().cpu().double()
        groups, group_of = torch.unique(inputs.group.cpu(), return_inverse=True)
        rollouts, rollout_of = torch.unique(inputs.rollout.cpu(), return_inverse=True)
        group_of_rollout = torch.zeros(len(rollouts), dtype=torch.int64).scatter_(0, rollout_of, group_of)
        if not torch.equal(group_of_rollout[rollout_of], group_of):
            raise ValueError("a rollout id occurs in two groups; rollout ids must be unique across groups")

        siblings = torch.bincount(rollout_of, minlength=len(rollouts))
        reward = torch.zeros(len(rollouts), dtype=torch.float64).index_add(0, rollout_of, values) / siblings
        n = torch.bincount(group_of_rollout, minlength=len(groups)).double()
        total = torch.zeros(len(groups), dtype=torch.float64)
        mean = total.index_add(0, group_of_rollout, reward) / n
        squares = (reward - mean[group_of_rollout]).square()
        std = (total.index_add(0, group_of_rollout, squares) / (n - 1).clamp(min=1)).sqrt()
        # the mean of equal floats may differ from them in the last bit, so compare the rewards themselves
        lowest = total.scatter_reduce(0, group_of, values, "amin", include_self=False)
        highest = total.scatter_reduce(0, group_of, values, "amax", include_self=False)
        equal = (lowest == highest) | (n == 1)
        return cls(values - mean[group_of], std[group_of], n[group_of], equal[group_of])

    def scores(self, values: Tensor) -> Tensor:
        """Return ``values`` [samples], exactly 0 where there is nothing to compare."""
        return torch.where(self.equal, 0.0, values)


def on_trained_tokens(inputs: AdvantageInputs, scores: Tensor) -> Tensor:
    """Give every trained token the score of its sample: [samples] -> [tokens], with the dtype of the rewards.

    Raises:
        ConfigError: ``kl_coef`` is set, which such an advantage cannot contain.
    """
    if inputs.kl_coef:
        raise ConfigError(
            f"--kl-coef {inputs.kl_coef:g} adds the KL penalty to the reward of each token, but this advantage "
            f"estimator has one value per sample; use --kl-loss-coef, or --advantage-estimator reinforce_plus_plus"
        )
    scores = scores.to(inputs.rewards).to(inputs.mask.device)
    return torch.where(inputs.mask.bool(), expand(scores, inputs.lengths), 0.0).to(scores.dtype)
