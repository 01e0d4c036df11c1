"""The learner: from finished samples to a better policy. Runs on every trainer rank.

collate -> on_batch -> old and reference log-probabilities -> advantages -> for each optimiser step: corrections, loss
weights, the trainer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from miles_core.algorithm.advantage import ADVANTAGES, KL_IN_REWARD, AdvantageInputs, whiten
from miles_core.algorithm.correction import identity, needs_of
from miles_core.algorithm.kl import engine_gap, kl_estimate
from miles_core.algorithm.overlong import overlong_penalty
from miles_core.algorithm.reduction import loss_weights
from miles_core.checkpoint.store import Store
from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Callbacks, Trainer
from miles_core.data.batch import Batch, collate
from miles_core.data.means import add, as_floats
from miles_core.data.sample import Sample
from miles_core.data.unit import Unit
from miles_core.errors import ConfigError, NonFiniteError
from miles_core.plugin.load import compose
from miles_core.train.correction import check_rollout_log_probs, correction_inputs
from miles_core.train.loss import policy_loss, supervised_loss
from miles_core.train.recorder import TokenRecorder

if TYPE_CHECKING:
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run

Metrics = dict[str, tuple[float, float]]


class Learner:
    """The trainer of one policy with everything the algorithm adds to it.

    Attributes:
        intact: False from the first optimiser step of a ``learn`` or ``supervise`` until it is done: then weights and
            optimiser are those of no completed step.
        tokens: what the last ``learn`` saw of each of its samples, where the run keeps samples (``--save-rollouts``).
    """

    def __init__(self, run: Run, policy: Policy, trainer: Trainer) -> None:
        self.intact = True
        self.tokens: list[TrainedTokens] = []
        self._recorder = TokenRecorder() if run.config.run.save_rollouts else None
        self.run, self.policy, self.trainer = run, policy, trainer
        hooks, options = run.hooks, run.config.algorithm
        self.corrections = hooks.chain("wrap_correction", run=run)
        self.correct = compose(identity, self.corrections)
        self.needs = needs_of(self.correct)
        if options.use_rollout_logprobs and self.needs.old:
            raise ConfigError(
                "--use-rollout-logprobs takes the engine's log-probs as the old policy's, and a correction "
                f"({', '.join(c.plugin for c in self.corrections)}) compares these with the trainer's; leave one of them out"
            )
        self.advantage: Callable[[AdvantageInputs], Tensor] = ADVANTAGES.get(options.advantage_estimator) or hooks.make(
            "advantage", options.advantage_estimator, run=run
        )
        forward = compose(trainer.forward, hooks.chain("wrap_forward", run=run, policy=policy))
        loss = compose(
            policy_loss(options, self.correct if self.corrections else None), hooks.chain("wrap_loss", run=run)
        )
        trainer.bind(
            Callbacks(
                forward=forward,
                loss=loss if self._recorder is None else self._recorder.watched(loss),
                optimizer_step=compose(
                    self._optimizer_step, hooks.chain("wrap_optimizer_step", run=run, policy=policy)
                ),
            )
        )
        self.exports = hooks.chain("wrap_weights", run=run, policy=policy)

    def learn(self, samples: Sequence[Sample], step_of: Sequence[int], count: int, step: int) -> Metrics:
        """Train on this replica's samples of one rollout (whole groups); metrics are (sum, weight) pairs.

        Args:
            samples: perhaps none, when there are fewer groups than data-parallel ranks.
            step_of: the optimiser step each sample belongs to (``optimiser_steps`` of all replicas' samples).
            count: optimiser steps, the same on every rank.
            step: completed rollout steps; a rank in another process learns it here.
        """
        self.run.step = step
        if self.corrections or self.run.config.algorithm.use_rollout_logprobs:
            check_rollout_log_probs(samples)
        batch = collate(samples, self.run.fields)
        batch.scalars["reward"] = self._rewards(samples)
        self.run.hooks.on("on_batch", run=self.run, policy=self.policy, batch=batch)
        steps = [[i for i, step in enumerate(step_of) if step == number] for number in range(count)]
        metrics: Metrics = {}
        with self.run.clock.phase("prepare"):
            self._log_probs(batch, steps=len(steps), metrics=metrics)
            batch.columns["advantages"] = self._advantages(batch)
        if self._recorder is not None:
            known = "old_log_probs" in batch.columns and not self.run.config.algorithm.use_rollout_logprobs
            self._recorder.start(batch, batch.column("old_log_probs") if known else None)
        with self.run.clock.phase("train"):
            for number, rows in enumerate(steps):
                add(metrics, self._optimise(batch.select(rows), first=number == 0))
        if self._recorder is not None:
            self.tokens = self._recorder.tokens(batch)
        self.intact = True
        return metrics

    def supervise(self, samples: Sequence[Sample], lr: float) -> Metrics:
        """One supervised step on prompt/response pairs."""
        batch = collate(samples)
        batch.columns["loss_weight"] = loss_weights(
            batch.mask, batch.lengths, batch.rollout, "token_mean", sum=self.trainer.sum
        )
        metrics = self.trainer.step(batch, loss=supervised_loss, lr=lr)
        self.intact = True
        return metrics

    def log_probs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Of each sample's response tokens, [response_length] float32; see ``LearnerHandle.log_probs``."""
        batch = collate(samples, self.run.fields)
        self.run.hooks.on("on_batch", run=self.run, policy=self.policy, batch=batch)
        flat = self.trainer.log_probs(batch, "verify")["log_probs"].float().cpu().numpy()
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        prompts = batch.prompt_lengths.tolist()
        return [flat[s + p : s + n] for s, p, n in zip(starts, prompts, lengths, strict=True)]

    def units(self, everywhere: bool = False) -> Iterator[Unit]:
        """The export stream, as plugins shaped it; ``everywhere`` as for ``Trainer.units``."""
        stream: Iterator[Unit] = compose(lambda: self.trainer.units(everywhere), self.exports)()
        return stream

    def save(self, directory: Path) -> None:
        """Write this rank's share of a checkpoint."""
        self.trainer.save(directory / "trainer")
        self.run.hooks.on(
            "on_save", run=self.run, policy=self.policy, store=Store(directory / "plugins", self.trainer.world)
        )

    def load(self, directory: Path) -> None:
        """Inverse of ``save``."""
        self.trainer.load(directory / "trainer")
        self.run.hooks.on(
            "on_load", run=self.run, policy=self.policy, store=Store(directory / "plugins", self.trainer.world)
        )

    def _optimizer_step(self) -> dict[str, float]:
        before, self.intact = self.intact, False
        try:
            return self.trainer.optimizer_step()
        except NonFiniteError:  # raised before anything changes
            self.intact = before
            raise

    def _rewards(self, samples: Sequence[Sample]) -> Tensor:
        """[samples] float64: the reward trained on, over-length penalty included; ``Sample.reward`` stays as given."""
        options = self.run.config.reward
        rewards = torch.tensor([s.reward_value(options.reward_key) for s in samples], dtype=torch.float64)
        if options.overlong_buffer_len is None:
            return rewards
        lengths = torch.tensor([s.response_length for s in samples])
        longest = self.run.config.rollout.max_response_len
        return rewards + overlong_penalty(
            lengths, longest, options.overlong_buffer_len, options.overlong_penalty_factor
        )

    def _log_probs(self, batch: Batch, steps: int, metrics: Metrics) -> None:
        """Old log-probabilities are computed when they differ from the current ones or something needs the whole step
        before its first backward; a single step is its own old policy otherwise and skips the pass."""
        options = self.run.config.algorithm
        own = options.advantage_estimator in ADVANTAGES and options.advantage_estimator not in KL_IN_REWARD
        in_reward = bool(options.kl_coef) and not own
        if options.use_rollout_logprobs:
            batch.columns["old_log_probs"] = batch.rollout_log_probs
        elif steps > 1 or self.needs.whole_step or in_reward:
            old = self.trainer.log_probs(batch, "old")["log_probs"]
            batch.columns["old_log_probs"] = old
            if "rollout_log_probs" in batch.columns:
                add(metrics, as_floats(engine_gap(old, batch.column("rollout_log_probs"), batch.mask)))
        if options.kl_coef or options.kl_loss_coef:
            batch.columns["ref_log_probs"] = self.trainer.log_probs(batch, "ref")["log_probs"]

    def _advantages(self, batch: Batch) -> Tensor:
        options = self.run.config.algorithm
        kl = None
        if options.kl_coef and "old_log_probs" in batch.columns:
            kl = kl_estimate(batch.column("old_log_probs"), batch.column("ref_log_probs"), "k1")
        inputs = AdvantageInputs(
            rewards=batch.scalars["reward"],
            group=batch.group,
            rollout=batch.rollout,
            lengths=batch.lengths,
            mask=batch.mask,
            kl=kl,
            gamma=options.gamma,
            kl_coef=options.kl_coef,
            sum=self.trainer.sum,
        )
        advantages = self.advantage(inputs)
        if options.normalize_advantages:
            advantages = whiten(advantages, batch.mask, self.trainer.sum)
        return advantages.float()

    def _current(self, batch: Batch, first: bool) -> Tensor | None:
        """Log-probabilities of the policy as it is now, where a correction needs them and they are not the old ones."""
        if not self.needs.current or (first and not self.run.config.algorithm.use_rollout_logprobs):
            return None
        return self.trainer.log_probs(batch, "old")["log_probs"]

    def _optimise(self, batch: Batch, first: bool) -> Metrics:
        options = self.run.config.algorithm
        batch.columns["loss_weight"] = loss_weights(
            batch.mask,
            batch.lengths,
            batch.rollout,
            options.loss_aggregation,
            options.loss_constant_length or self.run.config.rollout.max_response_len,
            self.trainer.sum,
        )
        metrics: Metrics = {}
        if self.corrections and "old_log_probs" in batch.columns:
            correction = self.correct(
                correction_inputs(batch, batch.column("old_log_probs"), self.trainer.sum, self._current(batch, first))
            )
            batch.columns["correction"] = correction.factor
            add(metrics, as_floats(correction.metrics))
        try:
            found = self.trainer.step(batch)
            # after the first step the policy is no longer the one that the engine sampled with
            add(metrics, {n: pair for n, pair in found.items() if first or not n.startswith("mismatch/")})
        except NonFiniteError as error:
            raise NonFiniteError(f"training step {self.run.step + 1}: {error}") from error
        return metrics
