"""Losses of one micro-batch: the policy loss, the value loss of a critic, and the supervised loss of a warm start; and the record of what each
token was trained with.

Quantities that depend on the whole optimiser step are computed before the first forward pass and stored in columns:
``loss_weight`` contains the normaliser, so that micro-batch losses are summed, and ``correction`` is the product of all
corrections. A loss therefore does not depend on how the step was split. A correction that considers each sample separately can
also be applied here, on the micro-batch; this saves a forward pass when the policy is its own old policy.

Auxiliary losses (load balancing, draft heads) are sums over a micro-batch, ``Output.aux``. They are divided by the number of trained
tokens of the whole optimiser step, so that the total does not depend on the split into micro-batches. Every trainer calls
``with_auxiliary`` between loss and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.correction import Correct
from miles_core.algorithm.objective import Clip, Objective, PolicyLossInputs
from miles_core.algorithm.ratio import engine_gap, kl_estimate, masked_sum
from miles_core.contracts.runtime import TrainedTokens
from miles_core.contracts.trainer import Context, Loss, LossFunction, Output
from miles_core.data.batch import Batch
from miles_core.data.current import CURRENT
from miles_core.errors import MilesError
from miles_core.train.correction import correction_inputs, refuse_sum

if TYPE_CHECKING:
    from miles_core.config.groups import Algorithm

#: Batch scalar with the index of each sample in the rollout.
POSITION = "position"


class PolicyLoss:
    """Core's ``loss(output, micro_batch, ctx)`` of a policy: the objective's loss of each token, times the correction, plus KL and entropy,
    times the token's weight. A correction weights only the policy gradient.

    It reads the columns ``loss_mask``, ``advantages`` and ``loss_weight``, and if present ``old_log_probs``, ``correction``,
    ``ref_log_probs``, ``rollout_log_probs`` and ``CURRENT``. Without ``old_log_probs`` the policy is its own old policy: the rollout has a single
    optimiser step.

    Args:
        options: coefficients and the clip.
        objective: gives the loss of each token.
        correct: applied to micro-batches without the column ``correction``; it must not need the whole step.
    """

    def __init__(self, options: Algorithm, objective: Objective = grpo.GRPO, correct: Correct | None = None) -> None:
        self.token_loss, self.correct = objective.policy_loss or grpo.policy_loss, correct
        self.configure(options)

    def configure(self, options: Algorithm) -> None:
        """Use other options from now on."""
        self.options, self.clip = options, Clip(options.eps_clip, options.eps_clip_high, options.eps_clip_c)

    def __call__(self, output: Output, batch: Batch, ctx: Context) -> Loss:
        """Compute the loss of a micro-batch."""
        assert output.log_probs is not None
        current, mask, columns, options = output.log_probs, batch.mask, batch.columns, self.options
        old = batch.column("old_log_probs") if "old_log_probs" in columns else current.detach()
        inputs = PolicyLossInputs(current, old, batch.column("advantages"), mask, batch.owner)
        objective, raw = self.token_loss(inputs, self.clip)
        metrics = {f"train/{name}": pair for name, pair in raw.items()}
        if "correction" in columns:
            objective = objective * batch.column("correction")
        elif self.correct is not None:
            correction = self.correct(correction_inputs(batch, old, refuse_sum))
            objective = objective * correction.factor
            metrics |= correction.metrics
        if options.kl_loss_coef or "ref_log_probs" in columns:
            ref = batch.column("ref_log_probs")
            if options.kl_loss_coef:
                kl = torch.where(mask.bool(), kl_estimate(current, ref, options.kl_loss_type), 0.0)
                objective = objective + options.kl_loss_coef * kl
            metrics["train/ref_kl"] = masked_sum(kl_estimate(current.detach(), ref, "k3"), mask)
        if output.entropy is not None:
            metrics["train/entropy"] = masked_sum(output.entropy, mask)
        if options.entropy_coef:
            assert output.entropy is not None
            objective = objective - options.entropy_coef * output.entropy
        value = (objective * batch.column("loss_weight")).sum()
        # a weighted mean over the step's tokens, independent of the split into micro-batches
        metrics["train/loss"] = (value.detach(), batch.column("loss_weight").sum())
        if "rollout_log_probs" in columns and ("old_log_probs" not in columns or options.use_rollout_logprobs):
            metrics |= engine_gap(current.detach(), batch.column("rollout_log_probs"), mask, batch.find_column(CURRENT))
        return Loss(value, metrics)


def supervised_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
    """Negative log-likelihood of the masked tokens, weighted by ``loss_weight``."""
    assert output.log_probs is not None
    nll = -output.log_probs
    return Loss((nll * batch.column("loss_weight")).sum(), {"sft/loss": masked_sum(nll, batch.mask)})


class ValueLoss:
    """A critic's ``loss(output, micro_batch, ctx)``: half the squared error of its values, clipped as in PPO (arXiv 1707.06347, in the form
    of OpenAI Baselines): the maximum of the squared errors of V and of V clipped to within ``--value-clip`` of the old V.

    It reads the columns ``loss_mask``, ``loss_weight``, ``returns`` and ``values`` (from before the rollout's first step).
    """

    def __init__(self, options: Algorithm) -> None:
        self.configure(options)

    def configure(self, options: Algorithm) -> None:
        """Use other options from now on."""
        self.clip = options.value_clip

    def __call__(self, output: Output, batch: Batch, ctx: Context) -> Loss:
        """Compute the loss of a micro-batch."""
        if output.values is None:
            raise MilesError(
                "the trainer computed no values for a policy of the role critic; it needs the capability values"
            )
        value, target, mask = output.values, batch.column("returns"), batch.mask
        error = (value - target).square()
        metrics = {"train/values": masked_sum(value.detach(), mask), "train/returns": masked_sum(target, mask)}
        if self.clip is not None:
            old = batch.column("values")
            clipped = (old + (value - old).clamp(-self.clip, self.clip) - target).square()
            metrics["train/value_clip_fraction"] = masked_sum((clipped > error).float(), mask)
            error = torch.maximum(error, clipped)
        share = (torch.where(mask.bool(), 0.5 * error, 0.0) * batch.column("loss_weight")).sum()
        metrics["train/value_loss"] = (share.detach(), batch.column("loss_weight").sum())
        return Loss(share, metrics)


def trained_tokens(batch: Batch, sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the number of trained tokens of a whole step, at least 1.

    Args:
        batch: one rank's samples of the step.
        sum: reduction over data-parallel ranks, ``Trainer.sum``.
    """
    return sum((batch.mask != 0).sum()).clamp(min=1)


def with_auxiliary(share: Loss, output: Output, tokens: Tensor) -> Loss:
    """Return ``share`` plus the auxiliary losses of ``output``.

    Args:
        share: result of the loss callback.
        output: argument of the loss callback.
        tokens: number of trained tokens of the whole step, over all data-parallel ranks.

    Returns:
        The sum, with each auxiliary loss as metric ``train/<name>`` (its mean over the step's trained tokens).
    """
    if not output.aux:
        return share
    value, metrics = share.value, dict(share.metrics)
    for name, (total, weight) in output.aux.items():
        value = value + total / tokens.to(total.device)
        metrics[f"train/{name}"] = (total.detach(), torch.as_tensor(weight).detach())
    return Loss(value, metrics)


class TokenRecorder:
    """Records the advantage that each token was trained with, and its log-probability before the rollout's first optimiser step, for the run's
    saved samples.

    If a separate pass computed the old policy's log-probabilities, these are used. Otherwise the rollout has a single optimiser
    step, and the loss wrapped with ``wrap_loss`` records the log-probabilities of that step.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._old: np.ndarray | None = None

    def wrap_loss(self, loss: LossFunction) -> LossFunction:
        """Wrap ``loss`` to record the log-probabilities of batches that have the scalar ``POSITION``."""

        def recording_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
            if POSITION in batch.scalars and output.log_probs is not None:
                self._seen.append((batch.scalars[POSITION], batch.lengths, output.log_probs.detach()))
            return loss(output, batch, ctx)

        return recording_loss

    def start(self, batch: Batch, old: Tensor | None) -> None:
        """Start a rollout. ``old`` holds the old policy's log-probabilities, [T]; if None, the wrapped loss records them."""
        self._seen, self._old = [], None if old is None else old.float().cpu().numpy()
        if old is None:
            batch.scalars[POSITION] = torch.arange(len(batch))

    def tokens(self, batch: Batch) -> list[TrainedTokens]:
        """Return the recorded values of each sample; log-probabilities are None on a rank that computes no loss."""
        ends, old = batch.lengths.cumsum(0), self._old
        first = (ends - batch.lengths + batch.prompt_lengths).tolist()
        advantages = batch.column("advantages").float().cpu().numpy()
        spans, prompts = list(map(slice, first, ends.tolist())), batch.prompt_lengths.tolist()
        seen = self.recorded_log_probs(len(batch)) if old is None else []
        self._seen, self._old = [], None
        if old is not None:
            return [TrainedTokens(old[span], advantages[span]) for span in spans]
        return [
            TrainedTokens(None if own is None else own[prompt:], advantages[span])
            for own, span, prompt in zip(seen, spans, prompts, strict=True)
        ]

    def recorded_log_probs(self, count: int) -> list[np.ndarray | None]:
        """Return what the wrapped loss recorded for ``count`` samples, each [tokens]; None on a rank that computes no loss."""
        result: list[np.ndarray | None] = [None] * count
        for positions, lengths, log_probs in self._seen:
            values, end = log_probs.float().cpu().numpy(), 0
            for position, length in zip(positions.tolist(), lengths.tolist(), strict=True):
                start, end = end, end + length
                # a padding micro-batch without trained tokens repeats a sample; it comes last and is ignored
                if position < count and result[position] is None:
                    result[position] = values[start:end]
        return result
