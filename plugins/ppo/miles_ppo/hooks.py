"""Hooks: add critics, attach values to the samples before training, train the critic next to its policy, and report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from miles_core.data import Batch, Sample, WeightUnit
from miles_core.plugin import Policy, Run, hookimpl
from miles_core.trainer import Context, Learned, LearnerHandle, Loss, LossFunction, Output, ValueLoss
from miles_ppo.config import VALUE_LOSS_COEF, PpoConfig
from miles_ppo.critics import add_critics, check_estimators, critic_of
from miles_ppo.metrics import derive, moments
from miles_ppo.trunk import TrunkCritic, without_head

Learn = Callable[[Sequence[Sample], int], Any]


class Ppo:
    """PPO with a critic per policy."""

    def __init__(self, options: PpoConfig) -> None:
        self.options = options
        #: policy name -> the value head on its trunk, in a trainer's process
        self.heads: dict[str, TrunkCritic] = {}

    @hookimpl
    def on_start(self, run: Run) -> None:
        check_estimators(run)
        add_critics(run)

    @hookimpl
    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        if role in ("train", "shared") and policy.role == "train" and _options(run, policy).trunk == "policy":
            self.heads[policy.name] = TrunkCritic(run, policy, model)

    @hookimpl
    def wrap_learn(self, run: Run, policy: Policy, handles: Mapping[str, LearnerHandle]) -> Callable[[Learn], Learn]:
        critic = critic_of(policy, run.policies)
        step_of = _Step(run, policy, handles[policy.name], None if critic is None else handles[critic.name])
        return lambda inner: lambda samples, step: step_of(inner, samples, step)

    @hookimpl
    def on_batch(self, run: Run, policy: Policy) -> None:
        if policy.name in self.heads:
            self.heads[policy.name].start(run.step)

    @hookimpl
    def wrap_loss(self, run: Run, policy: Policy) -> Callable[[LossFunction], LossFunction] | None:
        if policy.role == "critic":
            return _report_moments
        if policy.name not in self.heads:
            return None
        options, value = _options(run, policy), ValueLoss(run.config_of(policy).algorithm)
        coefficient = VALUE_LOSS_COEF if options.value_loss_coef is None else options.value_loss_coef

        def wrap(inner: LossFunction) -> LossFunction:
            def loss(output: Output, micro_batch: Batch, ctx: Context) -> Loss:
                own = value(output, micro_batch, ctx)
                metrics = own.metrics | moments(micro_batch)
                if run.step < options.only_steps:
                    output.aux.clear()  # auxiliary losses train the trunk
                    return Loss(own.value, metrics)
                found = inner(output, micro_batch, ctx)
                return Loss(found.value + coefficient * own.value, found.metrics | metrics)

            return loss

        return wrap

    @hookimpl
    def wrap_optimizer_step(self, policy: Policy) -> Callable[[Any], Any] | None:
        head = self.heads.get(policy.name)
        return None if head is None else lambda inner: lambda: head.optimizer_step(inner)

    @hookimpl
    def wrap_weights(self, policy: Policy, purpose: str) -> Callable[[Any], Any] | None:
        # a snapshot is loaded into the trainer's model, which has the head
        if policy.name not in self.heads or purpose == "snapshot":
            return None

        def wrap(inner: Callable[[], Iterator[WeightUnit]]) -> Callable[[], Iterator[WeightUnit]]:
            return lambda: without_head(inner())

        return wrap

    @hookimpl
    def on_step(self, metrics: dict[str, float]) -> None:
        derive(metrics)

    @hookimpl
    def on_save(self, policy: Policy | None, store: Any) -> None:
        if policy is not None and policy.name in self.heads:
            store.put("ppo", data={"steps": self.heads[policy.name].steps})

    @hookimpl
    def on_load(self, policy: Policy | None, store: Any) -> None:
        if policy is not None and policy.name in self.heads:
            self.heads[policy.name].steps = store.get("ppo")[1]["steps"]


class _Step:
    """What a policy and its critic learn from one rollout, in the driver.

    Args:
        run, policy: the run and the policy.
        own: handle to the policy's learner.
        critic: handle to its critic's; None for a head on the policy's trunk.
    """

    def __init__(self, run: Run, policy: Policy, own: LearnerHandle, critic: LearnerHandle | None) -> None:
        self.own, self.critic = own, critic
        self.options = _options(run, policy)
        self.algorithm = run.config_of(policy).algorithm
        #: the parts of an inline run take turns in one process
        self.concurrent = run.config.run.runtime != "inline"

    async def __call__(self, inner: Learn, samples: Sequence[Sample], step: int) -> Any:
        """Attach values, then train the critic, and the policy unless the critic learns alone."""
        await self.attach(samples)
        alone = step < self.options.only_steps
        if self.critic is None:
            return await inner(samples, step)
        if alone or not self.concurrent:
            await self.critic.learn(samples, step)
            return Learned({}, 0) if alone else await inner(samples, step)
        # wait for both calls before raising an error, so that no worker is interrupted
        both = await asyncio.gather(self.critic.learn(samples, step), inner(samples, step), return_exceptions=True)
        for result in both:
            if isinstance(result, BaseException):
                raise result
        return both[1]

    async def attach(self, samples: Sequence[Sample]) -> None:
        """Attach the values from before this rollout's first optimizer step, and the log-probabilities for a KL penalty in the reward.

        Log-probabilities that are attached are not computed again in training.
        """
        wanted = [] if self.critic is not None else ["values"]
        if self.algorithm.kl_coef or (wanted and not self.algorithm.use_rollout_logprobs):
            wanted.append("log_probs")
        if wanted:
            _attach(samples, await self.own.columns(samples, "old", wanted), "old_log_probs")
        if self.algorithm.kl_coef:
            _attach(samples, await self.own.columns(samples, "ref", ["log_probs"]), "ref_log_probs")
        if self.critic is not None:
            _attach(samples, await self.critic.columns(samples, "old", ["values"]), "")


def _attach(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], log_probs: str) -> None:
    """Store the columns of each sample in its fields; ``log_probs`` names the field of the column of that name."""
    for sample, columns in zip(samples, rows, strict=True):
        sample.fields |= {log_probs if name == "log_probs" else name: column for name, column in columns.items()}


def _options(run: Run, policy: Policy) -> PpoConfig:
    options: PpoConfig = run.config_of(policy).plugin("ppo")
    return options


def _report_moments(inner: LossFunction) -> LossFunction:
    """Add the moments of returns and errors to the metrics of a critic's loss."""

    def loss(output: Output, micro_batch: Batch, ctx: Context) -> Loss:
        found = inner(output, micro_batch, ctx)
        return Loss(found.value, found.metrics | moments(micro_batch))

    return loss
