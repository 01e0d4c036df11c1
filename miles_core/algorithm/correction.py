"""Corrections of the gap between the engine's and the trainer's distribution: the data that flows, no policy.

A correction runs once per optimiser step on all local tokens, after the old log-probabilities and advantages and before
the first backward pass. It returns columns the core multiplies into the policy loss; the normaliser keeps the original
mask. Plugins implement it through ``wrap_correction``; without a plugin it is ``identity``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_core.algorithm.advantage import local_sum


@dataclass(frozen=True)
class CorrectionInputs:
    """All local tokens of one optimiser step in the flat layout (see ``ragged``); nothing here has a gradient.

    Attributes:
        old_log_probs: [tokens] log-probabilities by the trainer's model that the ratio is taken to.
        rollout_log_probs: [tokens] log-probabilities the engine reported when it sampled.
        mask: [tokens] bool or 0/1, trained tokens.
        advantages: [tokens].
        lengths: [samples] int64, tokens of each sample.
        group: [samples] int64.
        rollout: [samples] int64.
        log_probs: [tokens] of the current policy where it differs from the old one, else None.
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


def identity(inputs: CorrectionInputs) -> Correction:
    """No correction: weight 1 and keep everywhere."""
    return Correction(
        torch.ones_like(inputs.old_log_probs), torch.ones_like(inputs.old_log_probs, dtype=torch.bool), {}
    )


def compose_corrections(inner: Correct, own: Correct) -> Correct:
    """Wrap ``inner`` with ``own``, the way a ``wrap_correction`` hook does: ``inner(inputs)`` times ``own(inputs)``.

    Each correction sees the same inputs, so a batch normalisation covers only the weights of the correction that asks
    for it, and the order of plugins does not change the product.
    """

    def correct(inputs: CorrectionInputs) -> Correction:
        return inner(inputs).times(own(inputs))

    return correct
