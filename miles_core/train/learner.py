"""The learner: trains a policy on finished samples. Every trainer rank has one.

The stages are: collate -> on_batch -> old and reference log-probabilities -> advantages -> for each optimizer step: corrections,
loss weights, the trainer's step. For a critic: values -> advantages -> returns -> the trainer's steps.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from miles_core.algorithm.choices import ALGORITHMS, loss_weights
from miles_core.algorithm.correction import identity, needs_of
from miles_core.algorithm.dapo import overlong_penalty
from miles_core.algorithm.objective import AdvantageInputs, Objective
from miles_core.algorithm.ratio import engine_gap, kl_estimate
from miles_core.algorithm.reinforce_plus_plus import whiten
from miles_core.checkpoint.store import Store
from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Callbacks, Pass, Trainer
from miles_core.data.batch import Batch, add, as_floats, collate
from miles_core.data.current import CURRENT, current_tokens
from miles_core.data.sample import Sample, reward_values
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import ConfigError, DataError, MilesError, NonFiniteError, PluginError
from miles_core.plugin.load import Wrapper, compose
from miles_core.train.correction import check_rollout_log_probs, correction_inputs
from miles_core.train.data_shard import DataShard, Pairs
from miles_core.train.finite import check_finite
from miles_core.train.loss import PolicyLoss, TokenRecorder, ValueLoss, supervised_loss
from miles_core.train.named_losses import LOSS_FIELDS, LOSS_SUM, POLICY, NamedLoss

if TYPE_CHECKING:
    from miles_core.contracts.hooks import Purpose
    from miles_core.contracts.run import Policy, Run


class Learner:
    """Combines the trainer of one policy with the algorithm's loss, advantages and corrections.

    Attributes:
        config: configuration of this policy.
        intact: False from the first optimizer step of ``learn`` or ``supervise`` until the call is complete. During that time the
            weights and the optimizer state belong to no completed step.
        held: number of calls of ``forward_backward`` whose gradients the trainer holds.
    """

    def __init__(self, run: Run, policy: Policy, trainer: Trainer) -> None:
        self.intact, self._replaced, self.held = True, False, 0
        self.run, self.policy, self.trainer = run, policy, trainer
        self.config = run.config_of(policy)
        self.is_critic = policy.role == "critic"
        hooks, options = run.hooks, self.config.algorithm
        self._recorder = TokenRecorder() if run.config.run.save_rollouts and policy.role == "train" else None
        self.corrections = [] if self.is_critic else hooks.chain("wrap_correction", run=run, policy=policy)
        self.correct = compose(identity, self.corrections)
        self.needs = needs_of(self.correct)
        if self.is_critic and "values" not in trainer.capabilities:
            raise ConfigError(
                f"the policy {policy.name} is a critic, but --trainer {run.config.run.trainer} has no value head; choose a trainer with "
                "the capability values"
            )
        if options.use_rollout_logprobs and self.needs.old:
            raise ConfigError(
                "--use-rollout-logprobs takes the engine's log-probs as the old policy's, but a correction "
                f"({', '.join(c.plugin for c in self.corrections)}) compares these with the trainer's; remove one of the two"
            )
        name = options.advantage_estimator
        self.objective = ALGORITHMS.get(name) or Objective.of(hooks.make("advantage", name, run=run, policy=policy))
        forward = compose(trainer.forward, hooks.chain("wrap_forward", run=run, policy=policy))
        self._loss = (
            ValueLoss(options)
            if self.is_critic
            else PolicyLoss(options, self.objective, self.correct if self.corrections else None)
        )
        loss = compose(self._loss, hooks.chain("wrap_loss", run=run, policy=policy))
        trainer.bind(
            Callbacks(
                forward=forward,
                loss=loss if self._recorder is None else self._recorder.wrap_loss(loss),
                optimizer_step=compose(
                    self._optimizer_step, hooks.chain("wrap_optimizer_step", run=run, policy=policy)
                ),
            )
        )

    def learn(self, shard: DataShard, step: int) -> tuple[Pairs, list[TrainedTokens]]:
        """Train on this replica's share of one rollout.

        Args:
            share: whole groups, possibly none.
            step: number of completed rollout steps; sets ``run.step``, which ranks in other processes do not otherwise receive.

        Returns:
            metrics as (sum, weight) pairs, and the recorded values of each sample (empty on a rank that computes no loss, or if
            the run does not save samples).
        """
        self.run.step, self.held = step, 0
        batch = self._batch(shard.samples)
        if self.config.trains_on_older:
            batch.columns[CURRENT] = current_tokens(shard.samples, shard.version)
        steps = [torch.from_numpy(np.flatnonzero(np.equal(shard.step_of, n))) for n in range(shard.count)]
        metrics: Pairs = {}
        with self.run.clock.phase("prepare"):
            if self.is_critic:
                self._values(batch)
            else:
                self._log_probs(batch, steps=len(steps), metrics=metrics)
            batch.columns["advantages"] = self._advantages(batch)
        if self._recorder is not None:
            known = "old_log_probs" in batch.columns and not self.config.algorithm.use_rollout_logprobs
            self._recorder.start(batch, batch.column("old_log_probs") if known else None)
        with self.run.clock.phase("train"):
            for number, rows in enumerate(steps):
                add(metrics, self._optimise(batch.select(rows), first=number == 0))
        self.intact = True
        tokens = [] if self._recorder is None else self._recorder.tokens(batch)
        return metrics, [] if any(seen.log_probs is None for seen in tokens) else tokens

    def is_intact(self) -> bool:
        """Return whether weights and optimizer state belong to a completed step."""
        return self.intact

    def supervise(self, samples: Sequence[Sample], lr: float) -> Pairs:
        """Train one supervised step on prompt/response pairs."""
        self.held = 0
        batch = collate(samples)
        batch.columns["loss_weight"] = loss_weights(
            batch.mask, batch.lengths, batch.rollout, "token_mean", sum=self.trainer.sum
        )
        metrics = self.trainer.step(batch, loss=supervised_loss, lr=lr)
        self.intact = True
        return metrics

    def forward_backward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float]
    ) -> tuple[Pairs, list[np.ndarray]]:
        """Add the gradients of these samples' loss to the held ones; see ``LearnerHandle.forward_backward``.

        Returns:
            metrics, and the log-probabilities of each sample's response tokens; [] on a rank that computes no loss.
        """
        recorder = self._recorder or TokenRecorder()
        function = self.trainer.callbacks.loss if loss == POLICY else NamedLoss(loss, settings)
        if loss != POLICY or self._recorder is None:  # the bound loss may record already
            function = recorder.wrap_loss(function)
        batch = collate(samples, (*self.run.fields, *LOSS_FIELDS))
        recorder.start(batch, None)
        self.run.hooks.on("on_batch", run=self.run, policy=self.policy, batch=batch)
        batch.columns.setdefault("loss_weight", batch.mask)
        batch.columns.setdefault("advantages", torch.zeros_like(batch.mask))  # a rank without samples
        try:
            metrics = self.trainer.accumulate_gradients(batch, function)
        except BaseException:
            self.drop_gradients()
            raise
        self.held += 1
        if LOSS_SUM in metrics:
            metrics[LOSS_SUM] = (metrics[LOSS_SUM][0], float(self.trainer.world.replica == 0))
        found = zip(recorder.recorded_log_probs(len(batch)), batch.prompt_lengths.tolist(), strict=True)
        return metrics, [own[prompt:] for own, prompt in found if own is not None]

    def apply_gradients(self, lr: float | None) -> Pairs:
        """Run the optimizer on the held gradients; see ``LearnerHandle.optimizer_step``."""
        if not self.held:
            raise MilesError(f"the policy {self.policy.name} holds no gradients; call forward_backward first")
        self.held = 0
        metrics = self.trainer.apply_gradients(lr)
        self.intact = True
        return metrics

    def drop_gradients(self) -> None:
        """See ``Trainer.drop_gradients``."""
        self.held = 0
        self.trainer.drop_gradients()

    def columns(
        self, samples: Sequence[Sample], wanted: Collection[str], top_k: int = 0, kind: Pass = "verify"
    ) -> list[dict[str, np.ndarray]]:
        """Compute columns for the response tokens of each sample: name -> [response_length, ...]; names as for ``Trainer.columns``."""
        batch = collate(samples, self.run.fields)
        self.run.hooks.on("on_batch", run=self.run, policy=self.policy, batch=batch)
        computed = self.trainer.columns(batch, kind, wanted, top_k)
        if missing := sorted({*wanted} - {*computed}):
            raise MilesError(
                f"{type(self.trainer).__name__} did not compute {', '.join(missing)}; use another --trainer"
            )
        arrays = {
            name: column.float().cpu().numpy() if column.is_floating_point() else column.cpu().numpy()
            for name, column in computed.items()
        }
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        spans = [slice(s + p, s + n) for s, p, n in zip(starts, batch.prompt_lengths.tolist(), lengths, strict=True)]
        return [{name: flat[span] for name, flat in arrays.items()} for span in spans]

    def units(
        self, purpose: Purpose = "sync", everywhere: bool = False, wrappers: list[Wrapper] | None = None
    ) -> Generator[WeightUnit, None, None]:
        """Yield the weights for a purpose, transformed by ``wrap_weights`` (or ``wrappers``); ``everywhere`` as for ``Trainer.units``.

        The trainer's stream is closed with this one: closing may compute, and computing while the interpreter exits aborts the process.
        """
        wrappers = self.weight_wrappers(purpose) if wrappers is None else wrappers
        with ExitStack() as opened:
            yield from compose(
                lambda: opened.enter_context(closing(unit for unit in self.trainer.units(everywhere))), wrappers
            )()

    def weight_wrappers(self, purpose: Purpose) -> list[Wrapper]:
        """Return the plugins' wrappers of one stream of weights."""
        return self.run.hooks.chain("wrap_weights", run=self.run, policy=self.policy, purpose=purpose)

    def configure(self, options: Mapping[str, float]) -> None:
        """See ``LearnerHandle.configure``."""
        self.policy.options = {**self.policy.options, **options}
        self.config = self.run.config_of(self.policy)
        self._loss.configure(self.config.algorithm)
        self.trainer.configure(
            {path.removeprefix("train."): v for path, v in options.items() if path.startswith("train.")}
        )

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint of the weights as transformed by plugins. This is a collective."""

        def export(directory: Path) -> None:
            with closing(self.units("export", everywhere=True)) as units:
                self.trainer.export(directory, self.run.tokenizer, units)

        compose(export, self.run.hooks.chain("wrap_export", run=self.run, policy=self.policy))(directory)

    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint; for a frozen policy with its initial weights, only the plugins' state.

        Raises:
            NonFiniteError: a weight is not finite; raised on every rank.
        """
        if self.policy.learns or self._replaced:
            check_finite(self.trainer, self.run.step)
            (directory / "trainer").mkdir(parents=True, exist_ok=True)
            self.trainer.save(directory / "trainer")
        self.run.hooks.on(
            "on_save", run=self.run, policy=self.policy, store=Store(directory / "plugins", self.trainer.world)
        )

    def load(self, directory: Path) -> None:
        """Inverse of ``save``."""
        if self.policy.learns or (directory / "trainer").is_dir():
            self.drop_gradients()
            self.trainer.load(directory / "trainer")
            self._replaced = True
        self.run.hooks.on(
            "on_load", run=self.run, policy=self.policy, store=Store(directory / "plugins", self.trainer.world)
        )

    def _optimizer_step(self) -> dict[str, float]:
        before, self.intact = self.intact, False
        try:
            return self.trainer.optimizer_step()
        except NonFiniteError:  # raised before any weight changes
            self.intact = before
            raise

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        """Collate the samples of a rollout into a batch with their rewards, and call ``on_batch``."""
        if not self.is_critic and (self.corrections or self.config.algorithm.use_rollout_logprobs):
            check_rollout_log_probs(samples)
        batch = collate(samples, self.run.fields)
        batch.scalars["reward"] = self._rewards(samples)
        self.run.hooks.on("on_batch", run=self.run, policy=self.policy, batch=batch)
        return batch

    def _rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Return the rewards to train on, float64 [samples], including the over-length penalty. ``Sample.reward`` is not changed."""
        options = self.config.reward
        rewards = torch.tensor(reward_values(samples, options.reward_key), dtype=torch.float64)
        if options.overlong_buffer_len is None:
            return rewards
        lengths = torch.tensor([s.response_length for s in samples])
        longest = self.config.rollout.max_response_len
        return rewards + overlong_penalty(
            lengths, longest, options.overlong_buffer_len, options.overlong_penalty_factor
        )

    def _log_probs(self, batch: Batch, steps: int, metrics: Pairs) -> None:
        """Add the columns ``old_log_probs`` and ``ref_log_probs`` where needed, unless ``wrap_learn`` has attached them.

        Old log-probabilities are computed if they differ from the current ones, or if the whole step is needed before the first
        backward pass. Otherwise the only step is its own old policy, and the pass is skipped.
        """
        options = self.config.algorithm
        in_reward = bool(options.kl_coef) and self.objective.kl_in_reward
        if options.use_rollout_logprobs:
            batch.columns["old_log_probs"] = batch.rollout_log_probs
        elif (
            (attached := self._has_column(batch, "old_log_probs"))
            or steps > 1
            or self.needs.whole_step
            or in_reward
            or self.objective.needs.old
        ):
            if not attached:
                batch.columns["old_log_probs"] = self.trainer.log_probs(batch, "old")["log_probs"]
            old = batch.column("old_log_probs")
            if "rollout_log_probs" in batch.columns:
                rollout = batch.column("rollout_log_probs")
                add(metrics, as_floats(engine_gap(old, rollout, batch.mask, batch.find_column(CURRENT))))
        if (options.kl_coef or options.kl_loss_coef) and not self._has_column(batch, "ref_log_probs"):
            batch.columns["ref_log_probs"] = self.trainer.log_probs(batch, "ref")["log_probs"]

    def _values(self, batch: Batch) -> None:
        """Add a critic's values before its first step, unless ``wrap_learn`` has attached them."""
        if not self._has_column(batch, "values"):
            batch.columns["values"] = self.trainer.columns(batch, "old", {"values"})["values"]

    def _has_column(self, batch: Batch, name: str) -> bool:
        """Whether ``wrap_learn`` attached the column to the samples of any rank. Adds it on a rank without samples, because all ranks
        must make the same passes. A collective."""
        if not bool(self.trainer.sum(torch.tensor(float(name in batch.columns)))):
            return False
        batch.columns.setdefault(name, torch.zeros_like(batch.mask))
        return True

    def _advantages(self, batch: Batch) -> Tensor:
        options, name = self.config.algorithm, self.config.algorithm.advantage_estimator
        for column in self.objective.needs.columns:
            if column in batch.columns or column in batch.scalars:
                continue
            if len(batch):
                raise DataError(
                    f"--advantage-estimator {name} reads the column {column!r}, which no sample has; add it to Sample.fields in a "
                    "wrap_learn hook"
                )
            batch.columns[column] = torch.zeros_like(batch.mask)  # a rank without samples
        kl = None
        if options.kl_coef and "old_log_probs" in batch.columns and "ref_log_probs" in batch.columns:
            kl = kl_estimate(batch.column("old_log_probs"), batch.column("ref_log_probs"), "k1")
        inputs = AdvantageInputs(
            rewards=batch.scalars["reward"],
            group=batch.group,
            rollout=batch.rollout,
            lengths=batch.lengths,
            mask=batch.mask,
            kl=kl,
            gamma=options.gamma,
            lam=options.lambd,
            kl_coef=options.kl_coef,
            sum=self.trainer.sum,
            batch=batch,
        )
        advantages = self.objective.advantage(inputs)
        if not isinstance(advantages, Tensor) or advantages.shape != batch.mask.shape:
            got = list(advantages.shape) if isinstance(advantages, Tensor) else repr(advantages)[:80]
            raise PluginError(
                f"--advantage-estimator {name} returned {got}; it returns one advantage for each token, a tensor of shape "
                f"{list(batch.mask.shape)}"
            )
        if (
            "values" in batch.columns and "returns" not in batch.columns
        ):  # an estimator may write other targets of the critic
            batch.columns["returns"] = torch.where(batch.mask.bool(), advantages + batch.column("values"), 0.0).float()
        if options.normalize_advantages and not self.is_critic:
            advantages = whiten(advantages, batch.mask, self.trainer.sum)
        return advantages.float()

    def _current(self, batch: Batch, first: bool) -> Tensor | None:
        """Return the current policy's log-probabilities if a correction needs them and they differ from the old ones, else None."""
        if not self.needs.current or (first and not self.config.algorithm.use_rollout_logprobs):
            return None
        return self.trainer.log_probs(batch, "old")["log_probs"]

    def _optimise(self, batch: Batch, first: bool) -> Pairs:
        options = self.config.algorithm
        batch.columns["loss_weight"] = loss_weights(
            batch.mask,
            batch.lengths,
            batch.rollout,
            options.loss_aggregation,
            options.loss_constant_length or self.config.rollout.max_response_len,
            self.trainer.sum,
        )
        metrics: Pairs = {}
        if self.corrections and "old_log_probs" in batch.columns:
            correction = self.correct(
                correction_inputs(batch, batch.column("old_log_probs"), self.trainer.sum, self._current(batch, first))
            )
            batch.columns["correction"] = correction.factor
            add(metrics, as_floats(correction.metrics))
        try:
            pairs = self.trainer.step(batch)
            # after the first step the policy differs from the one that the engine sampled from
            add(metrics, {n: pair for n, pair in pairs.items() if first or not n.startswith("mismatch/")})
        except NonFiniteError as error:
            raise NonFiniteError(f"training step {self.run.step + 1}: {error}") from error
        return metrics
