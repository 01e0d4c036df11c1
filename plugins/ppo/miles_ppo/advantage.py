"""Advantages of PPO: generalised advantage estimation (arXiv 1506.02438, eq. 16) on rewards per token.

The reward of a token is -kl_coef (log pi_old - log pi_ref), plus the sample's reward at its last trained token (as in arXiv 1909.08593):

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

with V = 0 after the last trained token. Tokens that are not trained (prompts, answers of tools) are skipped. V are the critic's values from
before the rollout's first optimizer step, so the policy (A) and the critic (the returns) use the same values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs, Needs, at_last_token, gae

#: Columns of a batch: the critic's values, and what they should have been.
VALUES, RETURNS = "values", "returns"


def make_advantage() -> Callable[[AdvantageInputs], Tensor]:
    """Provider of ``--advantage-estimator ppo``."""

    def ppo(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        advantages, returns = estimate(inputs, inputs.batch.column(VALUES))
        inputs.batch.columns[RETURNS] = returns.float()
        return advantages

    ppo.needs = Needs(old=False, whole_step=False, columns=(VALUES,))  # type: ignore[attr-defined]
    return ppo


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
