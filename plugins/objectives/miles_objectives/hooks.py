"""Where the losses plug in: advantage estimators that carry a policy loss, and the rewards of GDPO as a field of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from miles_core.data import Sample
from miles_core.plugin import ConfigError, DataError, Policy, Run, hookimpl
from miles_core.trainer import ADVANTAGES, AdvantageInputs, Needs, TokenLoss
from miles_objectives import dppo, dro, gmpo, sapo
from miles_objectives.config import ObjectivesConfig
from miles_objectives.gdpo import PARTS, gdpo

Estimator = Callable[[AdvantageInputs], Tensor]


class Objectives:
    """Attaches the rewards of GDPO to the samples."""

    def __init__(self, options: ObjectivesConfig) -> None:
        self.options = options

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


def make_gdpo(run: Run, policy: Policy) -> Estimator:
    """Provider of ``--advantage-estimator gdpo``."""
    weights = reward_weights(run.config_of(policy).plugin("objectives").gdpo_rewards)

    def estimate(inputs: AdvantageInputs) -> Tensor:
        assert inputs.batch is not None
        parts = inputs.batch.scalars.get(PARTS)
        if parts is None or parts.dim() != 2:  # a rank without samples
            parts = inputs.rewards.new_zeros(len(inputs.rewards), len(weights))
        return gdpo(inputs, parts, weights).to(inputs.rewards.dtype)

    estimate.needs = Needs(old=False, whole_step=False, columns=(PARTS,))  # type: ignore[attr-defined]
    return estimate


def make_gmpo(run: Run, policy: Policy) -> Estimator:
    """Provider of ``--advantage-estimator gmpo``."""
    return _grpo_with(gmpo.make_loss(_options(run, policy).gmpo_clip))


def make_sapo(run: Run, policy: Policy) -> Estimator:
    """Provider of ``--advantage-estimator sapo``."""
    options = _options(run, policy)
    return _grpo_with(sapo.make_loss(options.sapo_tau_positive, options.sapo_tau_negative))


def make_dppo(run: Run, policy: Policy) -> Estimator:
    """Provider of ``--advantage-estimator dppo``."""
    options = _options(run, policy)
    return _grpo_with(dppo.make_loss(options.dppo_divergence, options.dppo_threshold))


def make_dro(run: Run, policy: Policy) -> Estimator:
    """Provider of ``--advantage-estimator dro``."""
    return _grpo_with(dro.make_loss(_options(run, policy).dro_beta))


def _grpo_with(loss: TokenLoss) -> Estimator:
    """Return GRPO's advantages with another policy loss."""

    def estimate(inputs: AdvantageInputs) -> Tensor:
        return ADVANTAGES["grpo"](inputs)

    estimate.policy_loss = loss  # type: ignore[attr-defined]
    return estimate


def _options(run: Run, policy: Policy) -> ObjectivesConfig:
    options: ObjectivesConfig = run.config_of(policy).plugin("objectives")
    return options
