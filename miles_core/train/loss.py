"""The losses of one micro-batch: the policy's, and the supervised one of a warm start.

Everything that needs the whole optimiser step was done before the first forward and sits in columns: ``loss_weight``
carries the normaliser, so that micro-batch losses are summed, and ``correction`` the product of all corrections. A loss
therefore does not depend on how the step was split. A correction that looks at each sample by itself can also be applied
here, on the micro-batch, which spares a pass when the policy is its own old policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.algorithm.correction import Correct
from miles_core.algorithm.kl import engine_gap, kl_estimate
from miles_core.algorithm.policy_loss import Clip, PolicyLossInputs, policy_loss_of, token_objective
from miles_core.algorithm.reduction import masked_sum
from miles_core.contracts.trainer import Context, Loss, LossFunction, Output
from miles_core.data.batch import Batch
from miles_core.errors import MilesError
from miles_core.train.correction import correction_inputs, refuse_sum

if TYPE_CHECKING:
    from miles_core.config.groups import Algorithm


def policy_loss(options: Algorithm, correct: Correct | None = None) -> LossFunction:
    """The core's ``loss(output, micro_batch, ctx)`` for these options.

    ``correct`` is applied to micro-batches without a ``correction`` column; it must not need the whole step.

    Columns read: ``loss_mask``, ``advantages``, ``loss_weight``; ``old_log_probs`` (without it the policy is its own old
    policy: the only optimiser step of its rollout), ``correction``, ``ref_log_probs``, ``rollout_log_probs`` where present.
    """
    per_token = policy_loss_of(options.advantage_estimator)
    clip = Clip(options.eps_clip, options.eps_clip_high, options.eps_clip_c)

    def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
        assert output.log_probs is not None
        current, mask, columns = output.log_probs, batch.mask, batch.columns
        old = batch.column("old_log_probs") if "old_log_probs" in columns else current.detach()
        token_loss, raw = per_token(PolicyLossInputs(current, old, batch.column("advantages"), mask, batch.owner), clip)
        metrics = {f"train/{name}": pair for name, pair in raw.items()}
        if "correction" in columns:
            token_loss = token_loss * batch.column("correction")
        elif correct is not None:
            correction = correct(correction_inputs(batch, old, refuse_sum))
            token_loss = token_loss * correction.factor
            metrics |= correction.metrics
        kl = None
        if "ref_log_probs" in columns:
            ref = batch.column("ref_log_probs")
            if options.kl_loss_coef:
                kl = torch.where(mask.bool(), kl_estimate(current, ref, options.kl_loss_type), 0.0)
            metrics["train/ref_kl"] = masked_sum(kl_estimate(current.detach(), ref, "k3"), mask)
        if output.entropy is not None:
            metrics["train/entropy"] = masked_sum(output.entropy, mask)
        objective = token_objective(token_loss, kl, options.kl_loss_coef, output.entropy, options.entropy_coef)
        value = (objective * batch.column("loss_weight")).sum()
        # a weighted mean over the step's tokens, the same however the step was split
        metrics["train/loss"] = (value.detach(), batch.column("loss_weight").sum())
        if "rollout_log_probs" in columns and ("old_log_probs" not in columns or options.use_rollout_logprobs):
            metrics |= engine_gap(current.detach(), batch.column("rollout_log_probs"), mask)
        return Loss(value, metrics)

    return loss


def supervised_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
    """Negative log-likelihood of the masked tokens, weighted by ``loss_weight``."""
    assert output.log_probs is not None
    nll = -output.log_probs
    return Loss((nll * batch.column("loss_weight")).sum(), {"sft/loss": masked_sum(nll, batch.mask)})


def value_loss(options: Algorithm) -> LossFunction:
    """A critic's ``loss(output, micro_batch, ctx)``: half the squared error of its values, clipped as in PPO (arXiv 1707.06347; the
    clipped form is that of OpenAI's baselines): the larger of the error of V and that of V within ``--value-clip`` of the old V.

    Columns read: ``loss_mask``, ``loss_weight``, ``returns``, ``values`` (before the first step of the rollout).
    """

    def loss(output: Output, batch: Batch, ctx: Context) -> Loss:
        if output.values is None:
            raise MilesError(
                "the trainer computed no values for a policy of the role critic; it needs the capability values"
            )
        value, target, mask = output.values, batch.column("returns"), batch.mask
        error = (value - target).square()
        metrics = {"train/values": masked_sum(value.detach(), mask), "train/returns": masked_sum(target, mask)}
        if options.value_clip is not None:
            old = batch.column("values")
            clipped = (old + (value - old).clamp(-options.value_clip, options.value_clip) - target).square()
            metrics["train/value_clip_fraction"] = masked_sum((clipped > error).float(), mask)
            error = torch.maximum(error, clipped)
        share = (torch.where(mask.bool(), 0.5 * error, 0.0) * batch.column("loss_weight")).sum()
        metrics["train/value_loss"] = (share.detach(), batch.column("loss_weight").sum())
        return Loss(share, metrics)

    return loss
