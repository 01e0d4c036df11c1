"""REINFORCE++ (arXiv 2501.03262), and its variant with a baseline.

No critic and, without the baseline, no comparison of a prompt's rollouts: the batch is the baseline. For trained token t of rollout i:

    reward          r_t = -kl_coef (log pi_old(t) - log pi_ref(t)), plus R_i at the last trained token
    return          G_t = r_t + gamma r_{t+1} + gamma^2 r_{t+2} + ...           over trained tokens
    advantage       A_t = (G_t - mean G) / sqrt(var G + 1e-8)                   over the trained tokens of the step
    loss, weights   as in GRPO

With the baseline, R_i - mean R of its group takes the place of R_i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.objective import AdvantageInputs, Groups, Objective, local_sum
from miles_core.data.batch import Unmasked, expand

WHITEN_EPS = 1e-8


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute the whitened discounted returns, [tokens]."""
    return whitened_returns(inputs, inputs.rewards)


def baseline_advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute the whitened discounted returns of R minus the mean of its group, [tokens]."""
    groups = Groups.of(inputs)
    return whitened_returns(inputs, groups.scores(groups.centred).to(inputs.rewards))


def whitened_returns(inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
    """Compute the advantages for these rewards [samples] in place of those of ``inputs``."""
    if inputs.kl_coef and inputs.kl is None:
        raise ValueError(f"kl_coef is {inputs.kl_coef:g} but inputs.kl is missing")
    tokens = torch.zeros(len(inputs.mask), dtype=torch.float64, device=inputs.mask.device)
    if inputs.kl_coef and inputs.kl is not None:
        tokens = torch.where(inputs.mask.bool(), -inputs.kl_coef * inputs.kl.detach().double(), 0.0)
    tokens = tokens + at_last_token(rewards, inputs.mask, inputs.lengths)
    returns = discounted_returns(tokens, inputs.mask, inputs.lengths, inputs.gamma)
    return whiten(returns, inputs.mask, inputs.sum).to(inputs.rewards.dtype)


def at_last_token(rewards: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Put each sample's reward [samples] at its last unmasked token, with 0 elsewhere: [tokens] float64, on the device of ``mask``."""
    # the last unmasked token of a sample: its largest unmasked position, or -1 if there is none
    position = torch.arange(len(mask), device=mask.device)
    candidate = torch.where(mask.bool(), position, -1)
    sample = expand(torch.arange(len(lengths), device=mask.device), lengths)
    last = candidate.new_full((len(lengths),), -1).scatter_reduce(0, sample, candidate, "amax")
    has_tokens = last >= 0
    tokens = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    return tokens.index_put((last[has_tokens],), rewards.to(tokens)[has_tokens])


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Compute G_t of each unmasked token; all columns are [tokens]. Masked tokens are 0: they have no reward and no power of gamma."""
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


REINFORCE_PLUS_PLUS = Objective(advantage, grpo.policy_loss, kl_in_reward=True)
REINFORCE_PLUS_PLUS_BASELINE = Objective(baseline_advantage, grpo.policy_loss, kl_in_reward=True)
