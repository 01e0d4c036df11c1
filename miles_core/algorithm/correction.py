"""Corrections of the gap between the engine's and the trainer's distribution: the data that flows, no policy.

A correction runs once per optimiser step on all local tokens, after the old log-probabilities and advantages and before
the first backward pass. It returns columns the core multiplies into the policy loss; the normaliser keeps the original
mask. Plugins implement it through ``wrap_correction``; without a plugin it is ``identity``. What a correction ``Needs``
decides which forward passes are made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_core.algorithm.advantage import local_sum


@dataclass(frozen=True)
class CorrectionInputs:
    """All local tokens of one optimiser step as flat columns (see ``ragged``); nothing here has a gradient. A correction
    that does not need the whole step may be given a micro-batch instead.

    Attributes:
        old_log_probs: [tokens] log-probabilities by the trainer's model that the ratio is taken to.
        rollout_log_probs: [tokens] log-probabilities the engine reported when it sampled.
        mask: [tokens] bool or 0/1, trained tokens.
        advantages: [tokens].
        lengths: [samples] int64, tokens of each sample.
        group: [samples] int64.
        rollout: [samples] int64.
        log_probs: [tokens] of the current policy for a correction that needs them, where it differs from the old one
            (from a rollout's second optimiser step on, or with ``--use-rollout-logprobs``); else None.
        sum: adds a tensor over data and context ranks; a statistic of the whole step must go through it.
    """

    old_log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    lengths: Tensor
    group: Tensor
    rollout: Tensor
    log_probs: Tensor | None = None
    sum: Callable[[Tensor], Tensor] = local_sum


@dataclass(frozen=True)
class Correction:
    """What multiplies the policy loss: ``weight * keep``.

    Attributes:
        weight: [tokens] float, >= 0, detached.
        keep: [tokens] bool; False gives a token weight 0 but leaves the denominator as it was.
        metrics: name -> (sum, count) of the local tokens; the loop adds both over ranks and divides.
    """

    weight: Tensor
    keep: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def factor(self) -> Tensor:
        """``weight`` where kept, else 0: [tokens]. What core multiplies the token loss with."""
        return torch.where(self.keep, self.weight, 0.0)

    def times(self, other: Correction) -> Correction:
        """Both corrections at once: weights multiply, a token is kept if both keep it, metrics are united.

        Raises:
            ValueError: both report a metric of one name.
        """
        twice = sorted(self.metrics.keys() & other.metrics.keys())
        if twice:
            raise ValueError(f"two corrections report the metric {twice[0]!r}")
        return Correction(self.weight * other.weight, self.keep & other.keep, {**self.metrics, **other.metrics})


Correct = Callable[[CorrectionInputs], Correction]


@dataclass(frozen=True)
class Needs:
    """What a correction or an advantage reads, and so which passes over the batch it costs. A function declares it as its attribute
    ``needs``.

    Attributes:
        old: ``old_log_probs`` by the trainer's model. Refused together with ``--use-rollout-logprobs``, which has none.
        current: ``log_probs`` of the policy as it is now; one pass per optimiser step, except where it is the old policy.
        whole_step: the result for one sample depends on others (anything that goes through ``inputs.sum``). Where nothing does
            and a rollout is one optimiser step, old and current policy are the same; the correction is then applied to each
            micro-batch inside the training pass, and no pass is made for it. (An advantage always sees all samples.)
        columns: declared columns that the samples must carry (an advantage only).
    """

    old: bool = True
    current: bool = False
    whole_step: bool = True
    columns: tuple[str, ...] = ()

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.old or other.old,
            self.current or other.current,
            self.whole_step or other.whole_step,
            tuple(dict.fromkeys((*self.columns, *other.columns))),
        )


NOTHING = Needs(old=False, current=False, whole_step=False)


def needs_of(correct: Correct) -> Needs:
    """What ``correct`` declared; one that declared nothing may read the old log-probabilities of the whole step."""
    found: Needs = getattr(correct, "needs", Needs())
    return found


def identity(inputs: CorrectionInputs) -> Correction:
    """No correction: weight 1 and keep everywhere."""
    return Correction(
        torch.ones_like(inputs.old_log_probs), torch.ones_like(inputs.old_log_probs, dtype=torch.bool), {}
    )


identity.needs = NOTHING  # type: ignore[attr-defined]


def compose_corrections(inner: Correct, own: Correct, needs: Needs | None = None) -> Correct:
    """Wrap ``inner`` with ``own``, the way a ``wrap_correction`` hook does: ``inner(inputs)`` times ``own(inputs)``.

    Each correction sees the same inputs, so a batch normalisation covers only the weights of the correction that asks
    for it, and the order of plugins does not change the product. ``needs`` says what ``own`` reads; by default the old
    log-probabilities of the whole step.
    """

    def correct(inputs: CorrectionInputs) -> Correction:
        return inner(inputs).times(own(inputs))

    correct.needs = needs_of(inner) | (needs or Needs())  # type: ignore[attr-defined]
    return correct
