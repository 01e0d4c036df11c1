"""GDPO: several rewards per sample, each normalised separately (arXiv 2601.05242).

    A = sum_k w_k (R_k - mean_group R_k) / (std_group R_k + 1e-6),   then over all samples of the rollout: (A - mean) / (std + 1e-6)

GRPO on the sum of the rewards gives equal advantages to groups whose rewards differ in different entries. The loss is that of GRPO. If all A of a
rollout are equal, its advantages are 0. The constant 1e-6 is our choice, the same as in GRPO; the authors' code has 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miles_core.data import Sample
from miles_core.plugin import ConfigError, DataError, Policy, Run, hookimpl
from miles_core.trainer import ALGORITHMS, AdvantageInputs, Needs, Objective, expand

#: Field of a sample with its rewards, in the order of ``--gdpo-rewards``.
PARTS = "reward_parts"
_EPS = 1e-6


def make_gdpo(run: Run, policy: Policy) -> Objective:
    """Provider of ``--advantage-estimator gdpo``."""
    weights = reward_weights(run.config_of(policy).plugin("objectives").gdpo_rewards)

    def advantage(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        parts = inputs.batch.scalars.get(PARTS)
        if parts is None or parts.dim() != 2:  # a rank without samples
            parts = inputs.rewards.new_zeros(len(inputs.rewards), len(weights))
        return gdpo(inputs, parts, weights).to(inputs.rewards.dtype)

    return Objective(advantage, needs=Needs(old=False, whole_step=False, columns=(PARTS,)))


def gdpo(inputs: AdvantageInputs, parts: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Compute advantages [tokens] from the rewards ``parts`` [samples, len(weights)]."""
    ones = torch.ones_like(inputs.lengths)
    total = torch.zeros(len(ones), dtype=torch.float64)
    for k, weight in enumerate(weights.values()):
        own = replace(inputs, rewards=parts[:, k].double(), lengths=ones, mask=ones.float(), kl=None, batch=None)
        total = total + weight * ALGORITHMS["grpo"].advantage(own).cpu()
    count = inputs.sum(torch.tensor(float(len(total)), dtype=torch.float64)).clamp(min=1.0)
    mean = inputs.sum(total.sum()) / count
    deviation = (inputs.sum((total - mean).square().sum()) / (count - 1).clamp(min=1.0)).sqrt()
    scores = ((total - mean) / (deviation + _EPS)).to(inputs.mask.device)
    return torch.where(inputs.mask.bool(), expand(scores, inputs.lengths), 0.0)


class RewardParts:
    """Attaches the rewards of GDPO to the samples."""

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy) -> Callable[[Any], Any] | None:
        config = run.config_of(policy)
        if config.algorithm.advantage_estimator != "gdpo":
            return None
        names = [*reward_weights(config.plugin("objectives").gdpo_rewards)]

        def wrap(inner: Any) -> Any:
            async def learn(samples: Sequence[Sample], step: int) -> Any:
                for sample in samples:
                    sample.fields[PARTS] = reward_parts(sample, names)
                return await inner(samples, step)

            return learn

        return wrap


def reward_weights(words: Sequence[str]) -> dict[str, float]:
    """Parse ``--gdpo-rewards``: name -> weight.

    Raises:
        ConfigError: a weight is not a number, or a name occurs twice.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, weight = word.partition("=")
        try:
            value = float(weight or 1)
        except ValueError:
            raise ConfigError(
                f"--gdpo-rewards {word}: the weight {weight!r} is not a number; write NAME or NAME=WEIGHT"
            ) from None
        if not name or name in found:
            raise ConfigError(f"--gdpo-rewards {word}: each reward has a name of its own; write NAME or NAME=WEIGHT")
        found[name] = value
    return found


def reward_parts(sample: Sample, names: Sequence[str]) -> list[float]:
    """Return these entries of a sample's reward.

    Raises:
        DataError: the reward is not a dict, or lacks one of them.
    """
    reward = sample.reward
    if not isinstance(reward, Mapping) or any(name not in reward for name in names):
        kind = f"has the entries {', '.join(map(str, reward))}" if isinstance(reward, Mapping) else f"is {reward!r:.40}"
        raise DataError(
            f"--gdpo-rewards {','.join(names)}: the reward of sample {sample.index} {kind}; the reward function has to return a dict with "
            "each of these names"
        )
    return [float(reward[name]) for name in names]
