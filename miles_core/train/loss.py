"""The losses of one micro-batch: the policy's, and the supervised one of a warm start.

Everything that needs the whole optimiser step was done before the first forward and sits in columns: ``loss_weight``
carries the normaliser, so that micro-batch losses are summed, and ``correction`` the product of all corrections. A loss
therefore does not depend on how the step was split. A correction that looks at each sample by itself can also be applied
here, on the micro-batch, which spares a pass when the policy is its own old policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_core.algorithm.correction import Correct, CorrectionInputs
from miles_core.algorithm.kl import kl_estimate
from miles_core.algorithm.policy_loss import Clip, PolicyLossInputs, policy_loss_of, token_objective
from miles_core.contracts.trainer import Context, Loss, LossFunction, Output
from miles_core.data.batch import Batch
from miles_core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

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
        old = columns.get("old_log_probs", current.detach())
        token_loss, raw = per_token(
            PolicyLossInputs(current, _tensor(old), column(batch, "advantages"), mask, batch.owner), clip
        )
        metrics = {f"train/{name}": pair for name, pair in raw.items()}
        if "correction" in columns:
            token_loss = token_loss * column(batch, "correction")
        elif correct is not None:
            correction = correct(correction_inputs(batch, _tensor(old), _refuse_sum))
            token_loss = token_loss * correction.factor
            metrics |= correction.metrics
        kl = None
        if "ref_log_probs" in columns:
            ref = column(batch, "ref_log_probs")
            if options.kl_loss_coef:
                kl = torch.where(mask.bool(), kl_estimate(current, ref, options.kl_loss_type), 0.0)
            metrics["train/ref_kl"] = mean(kl_estimate(current.detach(), ref, "k3"), mask)
        if output.entropy is not None:
            metrics["train/entropy"] = mean(output.entropy, mask)
        objective = token_objective(token_loss, kl, options.kl_loss_coef, output.entropy, options.entropy_coef)
        value = (objective * column(batch, "loss_weight")).sum()
        # a weighted mean over the step's tokens, the same however the step was split
        metrics["train/loss"] = (value.detach(), column(batch, "loss_weight").sum())
        if "rollout_log_probs" in columns and ("old_log_probs" not in columns or options.use_rollout_logprobs):
            metrics |= mismatch(current.detach(), column(batch, "rollout_log_probs"), mask)
        return Loss(value, metrics)

    return loss


def correction_inputs(
    batch: Batch, old: Tensor, sum: Callable[[Tensor], Tensor], log_probs: Tensor | None = None
) -> CorrectionInputs:
    """What corrections see of ``batch``: an optimiser step or a micro-batch of one."""
    return CorrectionInputs(
        old_log_probs=old,
        rollout_log_probs=rollout_log_probs(batch),
        mask=batch.mask,
        advantages=column(batch, "advantages"),
        lengths=batch.lengths,
        group=batch.group,
        rollout=batch.rollout,
        log_probs=log_probs,
        sum=sum,
    )


def rollout_log_probs(batch: Batch) -> Tensor:
    """[T] of the engine; zeros in a batch that trains nothing, whose samples need not have them."""
    if "rollout_log_probs" not in batch.columns and not bool(batch.mask.any()):
        return torch.zeros_like(batch.mask)
    return column(batch, "rollout_log_probs")


def _refuse_sum(value: Tensor) -> Tensor:
    raise PluginError(
        "a correction declared Needs(whole_step=False) and asks for a sum over the optimiser step; declare whole_step=True"
    )


def supervised_loss(output: Output, batch: Batch, ctx: Context) -> Loss:
    """Negative log-likelihood of the masked tokens, weighted by ``loss_weight``."""
    assert output.log_probs is not None
    nll = -output.log_probs
    return Loss((nll * column(batch, "loss_weight")).sum(), {"sft/loss": mean(nll, batch.mask)})


def mismatch(train: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """How far trainer and engine disagree on the sampled tokens: mean |delta log p|, and k1 and k3 estimates of
    KL(rollout || train), as (sum, count). All arguments are [tokens]."""
    delta = torch.where(mask.bool(), train - rollout, 0.0).clamp(-20.0, 20.0)
    return {
        "mismatch/abs_log_prob": mean(delta.abs(), mask),
        "mismatch/kl_k1": mean(-delta, mask),
        "mismatch/kl_k3": mean(torch.expm1(delta) - delta, mask),
    }


def column(batch: Batch, name: str) -> Tensor:
    """A dense column; KeyError when it is absent."""
    return _tensor(batch.columns[name])


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def mean(value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over the masked tokens, their number), detached."""
    return (torch.where(mask.bool(), value.detach(), 0.0)).sum(), mask.sum()
