"""Losses that are selected by name for ``LearnerHandle.forward_backward``. The loss of a call is the sum over its trained tokens of

    loss_weight_t * L_t

where ``loss_weight`` is 1 unless the samples have that field; nothing is averaged. With p = exp(log_probs), q = exp(old_log_probs), the
advantage A and the ratio r = p / q, L_t is

    cross_entropy           -log p
    importance_sampling     -r A
    ppo                     -min(r A, clip(r, low, high) A)                 (arXiv 1707.06347)
    cispo                   -stop_gradient(clip(r, low, high)) A log p      (arXiv 2506.13585)
    dro                     -(A log p - beta / 2 (log r)^2)                 (arXiv 2405.19107)

``low`` and ``high`` are the settings ``clip_low_threshold`` (0.8) and ``clip_high_threshold`` (1.2). The loss ``policy`` is the run's own, with
its corrections, KL and entropy terms and the plugins' ``wrap_loss``; it reads the same fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from miles_core.algorithm.ratio import masked_sum, ratio_of
from miles_core.contracts.run import Run
from miles_core.contracts.trainer import Context, Loss, Output
from miles_core.data.batch import Batch, collate
from miles_core.data.column import find_token_fault
from miles_core.data.field import Field
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError

#: The loss that ``bind`` gave to the trainer.
POLICY = "policy"
#: Metric with the loss of a call. It is the only metric that is a sum and not a mean.
LOSS_SUM = "train/loss_sum"
#: Fields of samples that losses read, [response_length].
LOSS_FIELDS = tuple(Field(name, "float32", "response") for name in ("loss_weight", "old_log_probs", "advantages"))

#: (log p, log r, A, settings) -> L, each [tokens] float32.
TokenTerm = Callable[[Tensor, Tensor, Tensor, Mapping[str, float]], Tensor]


def _clip(log_ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio_of(log_ratio).clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _cross_entropy(log_p: Tensor, log_r: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    return -log_p


def _importance_sampling(log_p: Tensor, log_r: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    return -ratio_of(log_r) * advantages


def _ppo(log_p: Tensor, log_r: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    return -torch.minimum(ratio_of(log_r) * advantages, _clip(log_r, settings) * advantages)


def _cispo(log_p: Tensor, log_r: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    return -_clip(log_r.detach(), settings) * advantages * log_p


def _dro(log_p: Tensor, log_r: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    return -(log_p * advantages - 0.5 * settings["beta"] * log_r.square())


_THRESHOLDS: dict[str, float | None] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
#: name -> (term, settings with their defaults, None for one that must be given, whether it reads advantages and old log-probabilities)
_LOSSES: dict[str, tuple[TokenTerm, dict[str, float | None], bool]] = {
    "cross_entropy": (_cross_entropy, {}, False),
    "importance_sampling": (_importance_sampling, {}, True),
    "ppo": (_ppo, _THRESHOLDS, True),
    "cispo": (_cispo, _THRESHOLDS, True),
    "dro": (_dro, {"beta": None}, True),
}
LOSSES = (POLICY, *_LOSSES)


class NamedLoss:
    """The loss of a name as ``loss(output, micro_batch, ctx)``. Without ``old_log_probs`` the policy is its own old policy.

    Raises:
        ConfigError: there is no such loss or setting, or a setting is missing.
    """

    def __init__(self, name: str, settings: Mapping[str, float]) -> None:
        if name not in _LOSSES:
            raise ConfigError(f"there is no loss {name!r}; the losses are {', '.join(LOSSES)}")
        self.name, (self.term, defaults, self.reads_advantages) = name, _LOSSES[name]
        if unknown := sorted({*settings} - {*defaults}):
            raise ConfigError(f"the loss {name} has no setting {unknown[0]!r}; it has {', '.join(defaults) or 'none'}")
        given = {**defaults, **settings}
        if missing := [key for key, value in given.items() if value is None]:
            raise ConfigError(f"the loss {name} needs the setting {missing[0]}")
        self.settings = {key: float(value) for key, value in given.items() if value is not None}

    def __call__(self, output: Output, batch: Batch, ctx: Context) -> Loss:
        """Compute the loss of a micro-batch."""
        assert output.log_probs is not None
        mask = batch.mask.bool()
        log_p = torch.where(mask, output.log_probs, 0.0)
        log_r, advantages = torch.zeros_like(log_p), torch.zeros_like(log_p)
        if self.reads_advantages:
            old = batch.column("old_log_probs") if "old_log_probs" in batch.columns else log_p.detach()
            log_r = torch.where(mask, log_p - old, 0.0)
            advantages = batch.column("advantages")
        weight = torch.where(mask, batch.column("loss_weight"), 0.0)
        value = (self.term(log_p, log_r, advantages, self.settings) * weight).sum()
        return Loss(value, {LOSS_SUM: (value.detach(), torch.ones(())), "train/nll": masked_sum(-log_p, batch.mask)})


def check_loss(samples: Sequence[Sample], loss: str, settings: Mapping[str, float], vocabulary: int) -> None:
    """Check a call of ``forward_backward`` before anything is computed.

    Raises:
        ConfigError: see ``NamedLoss``; or settings for the loss ``policy``, which has those of the run.
        DataError: there is no sample, or one has invalid tokens, an invalid field, or lacks one that the loss reads.
    """
    if loss == POLICY and settings:
        raise ConfigError(f"the loss policy has the settings of the run, and no {min(settings)!r}")
    reads_advantages = loss == POLICY or NamedLoss(loss, settings).reads_advantages
    if not samples:
        raise DataError("forward_backward received no sample")
    for sample in samples:
        sample.validate(LOSS_FIELDS)
        if reads_advantages and "advantages" not in sample.fields:
            raise DataError(f"sample {sample.index} has no advantages, which the loss {loss} reads")
        for field in LOSS_FIELDS:
            if not np.isfinite(np.asarray(sample.fields.get(field.name, 0.0), np.float64)).all():
                raise DataError(f"sample {sample.index} has values in {field.name} that are not finite")
        if fault := find_token_fault(sample.tokens, vocabulary):
            raise DataError(f"sample {sample.index} has {fault}")


def vocabulary_of(run: Run) -> int:
    """Return the number of token ids of the run's model."""
    return int(run.plan.fact("model.vocab_size") or sys.maxsize)


def evaluate(samples: Sequence[Sample], log_probs: Sequence[np.ndarray], loss: NamedLoss) -> float:
    """Compute the loss of samples from the log-probabilities of their response tokens."""
    batch = collate(samples, LOSS_FIELDS)
    batch.columns.setdefault("loss_weight", batch.mask)
    column = torch.zeros(len(batch.tokens))
    starts = batch.starts + batch.prompt_lengths
    for start, own in zip(starts.tolist(), log_probs, strict=True):
        column[start : start + len(own)] = torch.from_numpy(own)
    return float(loss(Output(log_probs=column), batch, Context("verify", (), torch.arange(0))).value)
