"""Hooks of the critic.

The critic computes the values of each rollout before any training. The values are stored in the samples, so that advantages (policy) and
returns (critic) use the same values (PPO, arXiv 1707.06347; GAE, arXiv 1506.02438).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from miles_core.data import Sample
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import AdvantageInputs, Learned, LearnerHandle, Needs, at_last_token, gae
from miles_critic import CriticConfig


class Critic:
    """Adds a critic to the run, and trains it before its policy."""

    def __init__(self, options: CriticConfig) -> None:
        self.options = options

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Add a critic that starts from the policy's weights, unless the configuration file defines one."""
        if not any(policy.role == "critic" for policy in run.policies):
            options = {"lr": self.options.lr}
            run.policies.append(Policy(run.policy.hf_checkpoint, "critic", "critic", options=options))

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Callable:
        critic = next(handles[p.name] for p in run.policies if p.role == "critic")

        def wrap(inner: Callable) -> Callable:
            async def learn(samples: Sequence[Sample], step: int) -> Learned:
                for sample, values in zip(samples, await critic.values(samples), strict=True):
                    sample.fields["values"] = values
                await critic.learn(samples, step)
                return Learned({}, 0) if step < self.options.only_steps else await inner(samples, step)

            return learn

        return wrap


def make_advantage() -> Callable[[AdvantageInputs], Tensor]:
    """Provider of ``--advantage-estimator ppo``: GAE with the reward at the last token of a response."""

    def ppo(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        values = inputs.batch.column("values")
        rewards = at_last_token(inputs.rewards, inputs.mask, inputs.lengths).to(values.dtype)
        return gae(rewards, values, inputs.mask, inputs.lengths, inputs.gamma, inputs.lam)[0]

    ppo.needs = Needs(old=False, whole_step=False, columns=("values",))  # type: ignore[attr-defined]
    return ppo
