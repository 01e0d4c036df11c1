"""Interface of an algorithm: the advantages of tokens, and the policy loss of a token. Each algorithm has a separate module. Both are pure
functions of flat columns (see ``data.batch``): tensors [tokens] of all samples, one after the other, and tensors [samples]. ``Groups``
compares rewards with those of their group, the rollouts of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.data.batch import Batch, expand
from miles_core.errors import ConfigError

#: Metric name -> (sum, weight), for a mean over the tokens of the step.
Metrics = dict[str, tuple[Tensor, Tensor]]


def local_sum(value: Tensor) -> Tensor:
    """Reduction for a single process: return ``value``."""
    return value


@dataclass(frozen=True)
class AdvantageInputs:
    """All local samples of one rollout batch.

    Attributes:
        rewards: [samples] float64 or float32, finite.
        group: [samples] int64, equal for the samples of one prompt. Whole groups are on one rank.
        rollout: [samples] int64, equal for siblings (several samples cut from one rollout), unique across groups.
        lengths: [samples] int64, number of tokens of each sample in the flat columns.
        mask: [tokens], nonzero for trained tokens (response and loss mask).
        kl: [tokens] estimate of log pi_old - log pi_ref, or None.
        gamma, lam: discount and GAE's lambda.
        kl_coef: weight of ``kl`` inside the reward.
        sum: sums a tensor over all ranks that hold a part of the step.
        batch: the same samples with all columns (``batch.column("values")``); None if the caller provides no batch.
    """

    rewards: Tensor
    group: Tensor
    rollout: Tensor
    lengths: Tensor
    mask: Tensor
    kl: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.0
    sum: Callable[[Tensor], Tensor] = local_sum
    batch: Batch | None = None

    def __post_init__(self) -> None:
        samples = {len(self.rewards), len(self.group), len(self.rollout), len(self.lengths)}
        if len(samples) != 1:
            raise ValueError(f"rewards, group, rollout and lengths must be equally long, got {sorted(samples)}")
        tokens = int(self.lengths.sum())
        for name, column in (("mask", self.mask), ("kl", self.kl)):
            if column is not None and len(column) != tokens:
                raise ValueError(f"{name} has {len(column)} tokens, lengths add up to {tokens}")


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
        values = inputs.rewards.detach().cpu().double().numpy()
        groups, group_of = np.unique(inputs.group.cpu().numpy(), return_inverse=True)
        rollouts, rollout_of = np.unique(inputs.rollout.cpu().numpy(), return_inverse=True)
        group_of_rollout = np.zeros(len(rollouts), np.int64)
        group_of_rollout[rollout_of] = group_of
        if (group_of_rollout[rollout_of] != group_of).any():
            raise ValueError("a rollout id occurs in two groups; rollout ids must be unique across groups")

        reward = np.bincount(rollout_of, values, len(rollouts)) / np.bincount(rollout_of, minlength=len(rollouts))
        n = np.bincount(group_of_rollout, minlength=len(groups)).astype(np.float64)
        mean = np.bincount(group_of_rollout, reward, len(groups)) / n
        squares = np.square(reward - mean[group_of_rollout])
        variance = np.bincount(group_of_rollout, squares, len(groups)) / np.maximum(n - 1, 1)
        # the mean of equal floats may differ from them in the last bit, so compare the rewards themselves
        one = np.zeros(len(groups))
        one[group_of] = values
        equal = (np.bincount(group_of, values != one[group_of], len(groups)) == 0) | (n == 1)
        found = values - mean[group_of], variance[group_of], n[group_of], equal[group_of]
        centred, variances, n_of, equal_of = map(torch.from_numpy, found)
        return cls(centred, variances.sqrt(), n_of, equal_of)

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


@dataclass(frozen=True)
class Clip:
    """The trust region: ratios in [1 - eps, 1 + eps_high]; ``dual`` is c > 1 or None; eps_high None means eps."""

    eps: float = 0.2
    eps_high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.eps < 0:
            raise ConfigError(f"--eps-clip {self.eps:g} is negative; give a value >= 0, for example 0.2")
        if self.eps_high is not None and self.eps_high < 0:
            raise ConfigError(f"--eps-clip-high {self.eps_high:g} is negative; give a value >= 0, for example 0.28")
        if self.dual is not None and self.dual <= 1:
            raise ConfigError(f"--eps-clip-c {self.dual:g} must be greater than 1 (3 is usual)")

    @property
    def low(self) -> float:
        """The smallest ratio, 1 - eps."""
        return 1.0 - self.eps

    @property
    def high(self) -> float:
        """The largest ratio, 1 + eps_high."""
        return 1.0 + (self.eps if self.eps_high is None else self.eps_high)


@dataclass(frozen=True)
class PolicyLossInputs:
    """The tokens of one micro-batch; every column is [tokens].

    Attributes:
        log_probs: log pi of the current policy, with gradient.
        old_log_probs: log pi_old, no gradient.
        advantages: A.
        mask: nonzero for trained tokens.
        segments: int64, non-decreasing, index of the sample of each token. A loss with one ratio per sequence needs it, and needs complete
            samples in the micro-batch (masked tokens may be omitted).
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Tensor | None = None


#: ([tokens] loss, metrics). Masked tokens have loss 0 and gradient 0, whatever their log-probabilities are. Corrections multiply the loss,
#: weights normalise it, and the sum over all micro-batches and ranks is the loss of the optimiser step.
TokenLoss = Callable[[PolicyLossInputs, Clip], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Needs:
    """Inputs that a correction or an advantage estimator reads, which determine its additional forward passes. A correction declares them in
    its attribute ``needs``.

    Attributes:
        old: ``old_log_probs`` computed by the trainer. Not allowed with ``--use-rollout-logprobs``, which does not compute them.
        current: ``log_probs`` of the current policy; costs one pass per optimiser step, except when it equals the old policy.
        whole_step: the result for a sample depends on other samples (any use of ``inputs.sum``). If it is False and a rollout has a
            single optimiser step, old and current policy are the same; the correction is then applied to each micro-batch during the
            training pass, without an additional pass. (An advantage estimator always receives all samples.)
        columns: declared columns that the samples must have (advantage estimators only).
    """

    old: bool = True
    current: bool = False
    whole_step: bool = True
    columns: tuple[str, ...] = ()

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.old or other.old,
            self.current or other.current,
            self.whole_step or other.whole_step,
            tuple(dict.fromkeys((*self.columns, *other.columns))),
        )


NOTHING = Needs(old=False, current=False, whole_step=False)


@dataclass(frozen=True)
class Objective:
    """What ``--advantage-estimator`` selects.

    Attributes:
        advantage: returns [tokens].
        policy_loss: loss of each token; None for the clipped loss of GRPO.
        needs: what ``advantage`` reads besides its inputs.
        kl_in_reward: ``advantage`` supports ``kl_coef``.
    """

    advantage: Callable[[AdvantageInputs], Tensor]
    policy_loss: TokenLoss | None = None
    needs: Needs = NOTHING
    kl_in_reward: bool = False

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the advantages, [tokens]."""
        return self.advantage(inputs)

    @classmethod
    def of(cls, made: Any) -> Objective:
        """Return the objective that a plugin's function [``AdvantageInputs``] -> [tokens] describes by its attributes; without them it has
        the loss of GRPO and may read ``kl``."""
        own = {name: getattr(made, name) for name in ("policy_loss", "needs") if hasattr(made, name)}
        return cls(made, kl_in_reward=getattr(made, "kl_in_reward", True), **own)
