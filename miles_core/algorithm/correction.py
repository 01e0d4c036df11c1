"""Interface of corrections for the gap between the engine's and the trainer's distribution.

A correction runs once per optimiser step on all local tokens, after the computation of old log-probabilities and advantages and before
the first backward pass. It returns columns with which core multiplies the policy loss; the normaliser uses the original mask. Plugins
implement corrections through ``wrap_correction``; the default is ``identity``. The declared ``Needs`` of a correction determine the
additional forward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_core.algorithm.objective import NOTHING, Needs, local_sum
from miles_core.data.batch import find_column_fault, find_pair_fault, find_value_fault
from miles_core.errors import describe


@dataclass(frozen=True)
class CorrectionInputs:
    """All local tokens of one optimiser step as flat columns (see ``data.batch``), without gradients. A correction that does not need the
    whole step may receive a micro-batch instead.

    Attributes:
        old_log_probs: [tokens] log-probabilities of the old policy, computed by the trainer.
        rollout_log_probs: [tokens] log-probabilities that the engine reported for its samples.
        mask: [tokens] bool or 0/1, trained tokens.
        advantages: [tokens].
        lengths: [samples] int64, tokens of each sample.
        group: [samples] int64.
        rollout: [samples] int64.
        log_probs: [tokens] log-probabilities of the current policy, if the correction needs them and they differ from the old ones
            (from a rollout's second optimiser step on, or with ``--use-rollout-logprobs``); else None.
        sum: sums a tensor over data and context ranks; every statistic of the whole step must use it.
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
    """Factor ``weight * keep`` of the policy loss.

    Attributes:
        weight: [tokens] float, >= 0, detached.
        keep: [tokens] bool; False gives a token weight 0 without changing the normaliser.
        metrics: name -> (sum, count) of the local tokens; the loop sums both over ranks and divides.
    """

    weight: Tensor
    keep: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def factor(self) -> Tensor:
        """[tokens] ``weight`` of kept tokens, 0 for others; core multiplies the token loss by it."""
        return torch.where(self.keep, self.weight, 0.0)

    def find_fault(self, mask: Tensor) -> str:
        """Describe the first entry that is not one weight and one keep flag per token of ``mask`` [tokens]; "" if there is none. Values are
        checked only on a CPU, so that the host does not wait for a GPU."""
        if fault := find_column_fault("Correction.weight", self.weight, mask):
            return fault
        if not isinstance(self.keep, Tensor) or self.keep.dtype != torch.bool or self.keep.shape != mask.shape:
            return f"Correction.keep is {describe(self.keep)}; expected a bool Tensor [tokens] = {list(mask.shape)}"
        if self.weight.requires_grad:
            return "Correction.weight has a gradient; detach it"
        if self.weight.device.type == "cpu" and (fault := find_value_fault("Correction.weight", self.weight, least=0)):
            return fault
        return find_pair_fault(self.metrics)

    def times(self, other: Correction) -> Correction:
        """Combine two corrections: multiply weights, keep a token if both keep it, merge metrics.

        Raises:
            ValueError: both report a metric with the same name.
        """
        twice = sorted(self.metrics.keys() & other.metrics.keys())
        if twice:
            raise ValueError(f"two corrections report the metric {twice[0]!r}")
        return Correction(self.weight * other.weight, self.keep & other.keep, {**self.metrics, **other.metrics})


#: A function that computes the correction of an optimizer step; ``wrap_correction`` wraps it.
Correct = Callable[[CorrectionInputs], Correction]


def needs_of(correct: Correct) -> Needs:
    """Return the declared needs of ``correct``; the default is the old log-probabilities of the whole step."""
    found: Needs = getattr(correct, "needs", Needs())
    return found


def identity(inputs: CorrectionInputs) -> Correction:
    """No correction: weight 1 and keep everywhere."""
    return Correction(
        torch.ones_like(inputs.old_log_probs), torch.ones_like(inputs.old_log_probs, dtype=torch.bool), {}
    )


identity.needs = NOTHING  # type: ignore[attr-defined]


def compose_corrections(inner: Correct, own: Correct, needs: Needs | None = None) -> Correct:
    """Compose two corrections, for use in ``wrap_correction``: the result is ``inner(inputs)`` times ``own(inputs)``.

    All corrections receive the same inputs, so a batch normalisation covers only the weights of its own correction, and the order of
    plugins does not change the product. ``needs`` declares the inputs of ``own``; the default is the old log-probabilities of the whole
    step.
    """

    def correct(inputs: CorrectionInputs) -> Correction:
        return inner(inputs).times(own(inputs))

    correct.needs = needs_of(inner) | (needs or Needs())  # type: ignore[attr-defined]
    return correct
