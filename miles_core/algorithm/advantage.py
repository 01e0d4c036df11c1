"""Advantage estimators: compute a per-token advantage from one reward per sample.

Group estimators compare the n rollouts of a prompt, so every call must receive whole groups (with several ranks, each group must be
on one rank). REINFORCE++ uses statistics of the whole optimiser step instead, which ``AdvantageInputs.sum`` reduces over ranks.
Statistics are float64; the result has the dtype of the rewards.

Sources: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740), GSPO (2507.18071), CISPO (2506.13585),
REINFORCE++ (2501.03262), GAE (1506.02438).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.data.batch import Batch, Unmasked, expand
from miles_core.errors import ConfigError

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8


def local_sum(value: Tensor) -> Tensor:
    """Reduction for a single process: return ``value``."""
    return value


@dataclass(frozen=True)
class AdvantageInputs:
    """All local samples of one rollout batch as flat columns (see ``data.batch``).

    Attributes:
        rewards: [samples] float64 or float32, finite.
        group: [samples] int64, equal for the samples of one prompt.
        rollout: [samples] int64, equal for siblings (several samples cut from one rollout), unique across groups.
        lengths: [samples] int64, number of tokens of each sample in the flat columns.
        mask: [tokens], nonzero for trained tokens (response and loss mask).
        kl: [tokens] estimate of log pi_old - log pi_ref, or None. Used by the REINFORCE++ family only.
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


def group_scores(rewards: Tensor, group: Tensor, rollout: Tensor, how: str) -> Tensor:
    """Compare each reward [samples] with its group.

    The statistics count a rollout once, independent of its number of siblings; its reward is the mean over the siblings. n is the
    number of rollouts of the group. Runs on the CPU, so that the order of summation is fixed.

    Args:
        rewards, group, rollout: as in ``AdvantageInputs``.
        how: ``"normalize"``: (R - mean) / (std + 1e-6), std unbiased; ``"center"``: R - mean; ``"leave_one_out"``:
            (R - mean) n / (n - 1), which equals R minus the mean of the others.

    Returns:
        [samples], dtype and device of ``rewards``; exactly 0 if n = 1 or all rewards of the group are equal.
    """
    values = rewards.detach().cpu().double()
    groups, group_of = torch.unique(group.cpu(), return_inverse=True)
    rollouts, rollout_of = torch.unique(rollout.cpu(), return_inverse=True)
    group_of_rollout = torch.zeros(len(rollouts), dtype=torch.int64).scatter_(0, rollout_of, group_of)
    if not torch.equal(group_of_rollout[rollout_of], group_of):
        raise ValueError("a rollout id occurs in two groups; rollout ids must be unique across groups")

    siblings = torch.bincount(rollout_of, minlength=len(rollouts))
    reward_of_rollout = torch.zeros(len(rollouts), dtype=torch.float64).index_add(0, rollout_of, values) / siblings
    n = torch.bincount(group_of_rollout, minlength=len(groups)).double()
    total = torch.zeros(len(groups), dtype=torch.float64)
    mean = total.index_add(0, group_of_rollout, reward_of_rollout) / n
    centred = values - mean[group_of]

    if how == "normalize":
        squares = (reward_of_rollout - mean[group_of_rollout]).square()
        std = (total.index_add(0, group_of_rollout, squares) / (n - 1).clamp(min=1)).sqrt()
        scores = centred / (std[group_of] + GRPO_EPS)
    elif how == "leave_one_out":
        scores = centred * (n / (n - 1).clamp(min=1))[group_of]
    elif how == "center":
        scores = centred
    else:
        raise ValueError(f"how={how!r}: one of normalize, center, leave_one_out")

    # The mean of equal floats may differ from them in the last bit, so compare the rewards themselves.
    lowest = total.scatter_reduce(0, group_of, values, "amin", include_self=False)
    highest = total.scatter_reduce(0, group_of, values, "amax", include_self=False)
    nothing_to_compare = (lowest == highest) | (n == 1)
    scores = torch.where(nothing_to_compare[group_of], 0.0, scores)
    return scores.to(rewards)


def whiten(values: Tensor, mask: Tensor, sum: Callable[[Tensor], Tensor] = local_sum) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) over the unmasked tokens of all ranks, with unbiased var; masked tokens become 0.

    ``values`` and ``mask`` are [tokens]; ``sum`` sums over ranks. With fewer than two tokens var is 0.
    """
    keep = mask.bool()
    exact = torch.where(keep, values.double(), 0.0)
    count = sum(keep.sum().double())
    mean = sum(exact.sum()) / count.clamp(min=1.0)
    centred = torch.where(keep, exact - mean, 0.0)
    var = sum(centred.square().sum()) / (count - 1.0).clamp(min=1.0)
    return (centred / (var + WHITEN_EPS).sqrt()).to(values.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Compute G_t = sum over k >= 0 of gamma^k r_{t+k} over the unmasked tokens of each sample; masked tokens are 0.

    All columns are [tokens]. Masked tokens are skipped: they have no reward and do not count as a step of the discount.
    """
    unmasked = Unmasked(mask, lengths)
    matrix = unmasked.pack(rewards)
    if gamma == 1.0:
        return unmasked.unpack(matrix.flip(1).cumsum(1).flip(1))
    running = matrix.new_zeros(len(matrix))
    returns = torch.empty_like(matrix)
    for t in reversed(range(unmasked.width)):
        running = matrix[:, t] + gamma * running
        returns[:, t] = running
    return unmasked.unpack(returns)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the unmasked tokens of each sample.

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after the last unmasked token; A_t = delta_t + gamma lam A_{t+1}.
    Not whitened.

    Args:
        rewards, values, mask: [tokens]; ``values[t]`` is the critic's value of the state in which token t is chosen.
        lengths: [samples].

    Returns:
        advantages and returns (A + V), both [tokens], 0 on masked tokens.
    """
    unmasked = Unmasked(mask, lengths)
    reward, value = unmasked.pack(rewards), unmasked.pack(values)
    advantages = torch.zeros_like(reward)
    running = reward.new_zeros(len(reward))
    following = reward.new_zeros(len(reward))
    for t in reversed(range(unmasked.width)):
        delta = reward[:, t] + gamma * following - value[:, t]
        running = delta + gamma * lam * running
        advantages[:, t] = running
        following = value[:, t]
    # The padding of shorter rows has reward and value 0, so its delta is 0.
    advantages = unmasked.unpack(advantages)
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)


def at_last_token(rewards: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Put each sample's reward at its last unmasked token, with 0 elsewhere: [tokens] float64, on the device of ``mask``.

    Args:
        rewards, lengths: [samples].
        mask: [tokens].
    """
    # The last unmasked token of a sample: its largest unmasked position, or -1 if there is none.
    position = torch.arange(len(mask), device=mask.device)
    candidate = torch.where(mask.bool(), position, -1)
    sample = expand(torch.arange(len(lengths), device=mask.device), lengths)
    last = candidate.new_full((len(lengths),), -1).scatter_reduce(0, sample, candidate, "amax")
    has_tokens = last >= 0
    tokens = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    return tokens.index_put((last[has_tokens],), rewards.to(tokens)[has_tokens])


def grpo(inputs: AdvantageInputs) -> Tensor:
    """GRPO: (R - mean) / (std + 1e-6) on every unmasked token of the sample. [tokens]"""
    return _spread(inputs, "normalize")


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """Dr.GRPO: R - mean. Its constant normaliser is a choice of reduction (``policy_loss.loss_weights``). [tokens]"""
    return _spread(inputs, "center")


def rloo(inputs: AdvantageInputs) -> Tensor:
    """RLOO: R minus the mean of the other rollouts of the group. [tokens]"""
    return _spread(inputs, "leave_one_out")


def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    """REINFORCE++: discounted return of -kl_coef kl_t, plus R at the last unmasked token, whitened. [tokens]"""
    return _whitened_returns(inputs, inputs.rewards)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """REINFORCE++-baseline: as ``reinforce_plus_plus`` on R minus the mean of its group. [tokens]"""
    centred = group_scores(inputs.rewards, inputs.group, inputs.rollout, "center")
    return _whitened_returns(inputs, centred)


def _spread(inputs: AdvantageInputs, how: str) -> Tensor:
    if inputs.kl_coef:
        raise ConfigError(
            f"--kl-coef {inputs.kl_coef:g} adds the KL penalty to the reward of each token, but this advantage "
            f"estimator has one value per sample; use --kl-loss-coef, or --advantage-estimator reinforce_plus_plus"
        )
    scores = group_scores(inputs.rewards, inputs.group, inputs.rollout, how).to(inputs.mask.device)
    return torch.where(inputs.mask.bool(), expand(scores, inputs.lengths), 0.0).to(scores.dtype)


def _whitened_returns(inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
    if inputs.kl_coef and inputs.kl is None:
        raise ValueError(f"kl_coef is {inputs.kl_coef:g} but inputs.kl is missing")
    tokens = torch.zeros(len(inputs.mask), dtype=torch.float64, device=inputs.mask.device)
    if inputs.kl_coef and inputs.kl is not None:
        tokens = torch.where(inputs.mask.bool(), -inputs.kl_coef * inputs.kl.detach().double(), 0.0)
    tokens = tokens + at_last_token(rewards, inputs.mask, inputs.lengths)
    returns = discounted_returns(tokens, inputs.mask, inputs.lengths, inputs.gamma)
    return whiten(returns, inputs.mask, inputs.sum).to(inputs.rewards.dtype)


ADVANTAGES: dict[str, Callable[[AdvantageInputs], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gspo": grpo,
    "cispo": grpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""Estimator name -> function from ``AdvantageInputs`` to advantages [tokens]."""

KL_IN_REWARD = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""The estimators that accept ``kl_coef``; others raise ConfigError."""
