"""PPO with a critic (arXiv 1707.06347), and generalised advantage estimation (arXiv 1506.02438).

V is the critic's value of the state in which a token is chosen, from before the rollout's first optimizer step. For trained token t of a
sample with reward R (tokens that are not trained, such as prompts and answers of tools, are skipped):

    reward          r_t = -kl_coef (log pi_old(t) - log pi_ref(t)), plus R at the last trained token (as in arXiv 1909.08593)
    error           delta_t = r_t + gamma V_{t+1} - V_t                          V = 0 after the last trained token
    advantage       A_t = delta_t + gamma lambda A_{t+1}                         equation 16; --normalize-advantages whitens it
    return          G_t = A_t + V_t
    ratio           rho_t = pi(t) / pi_old(t)
    policy loss     max(-A_t rho_t, -A_t clip(rho_t, 1 - eps, 1 + eps_high))     core's clipped loss, see ``miles_core.algorithm.grpo``
    value loss      max((V' - G_t)^2, (clip(V', V_t - c, V_t + c) - G_t)^2) / 2  of the new value V'; c is --value-clip

Both losses have the weights of --loss-aggregation. The critic's loss is ``miles_core.trainer.ValueLoss``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.data import Unmasked
from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs, Needs, Objective, at_last_token

#: Columns of a batch: the critic's values, and their targets.
VALUES, RETURNS = "values", "returns"


def make_advantage() -> Objective:
    """Provider of ``--advantage-estimator ppo``."""
    return Objective(advantage, needs=Needs(old=False, whole_step=False, columns=(VALUES,)), kl_in_reward=True)


def advantage(inputs: AdvantageInputs) -> Tensor:
    """Compute A_t, [tokens], and store G_t in the batch as the column ``RETURNS``."""
    assert inputs.batch is not None
    advantages, returns = estimate(inputs, inputs.batch.column(VALUES))
    inputs.batch.columns[RETURNS] = returns.float()
    return advantages


def estimate(inputs: AdvantageInputs, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, both [tokens] float64 and 0 where nothing is trained.

    Args:
        inputs: the samples; ``kl`` is needed with ``kl_coef``.
        values: [tokens], the critic's value of the state in which each token is chosen.

    Raises:
        MilesError: ``kl_coef`` is set without ``kl``.
    """
    rewards = at_last_token(inputs.rewards, inputs.mask, inputs.lengths)
    if inputs.kl_coef and len(inputs.lengths):
        if inputs.kl is None:
            raise MilesError(
                f"--kl-coef {inputs.kl_coef:g} needs the log-probs of policy and reference at every token, and the samples lack the fields "
                "old_log_probs and ref_log_probs; a wrap_learn hook that replaces the one of this plugin has to attach them"
            )
        rewards = rewards - inputs.kl_coef * torch.where(inputs.mask.bool(), inputs.kl.double(), 0.0)
    return gae(rewards, values.double(), inputs.mask, inputs.lengths, inputs.gamma, inputs.lam)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns over the unmasked tokens of each sample, both [tokens], 0 on masked tokens.

    Args:
        rewards, values, mask: [tokens].
        lengths: [samples].
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
    # the padding of shorter rows has reward and value 0, so its delta is 0
    advantages = unmasked.unpack(advantages)
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)
