"""Importance weights between the engine's and the trainer's distributions.

The engine samples with its own kernels, number format and routing, so the trainer's log-probabilities of the same tokens differ. The policy
gradient is re-weighted with rho_t = exp(log p_train_old - log p_rollout) per token, or per sequence with the product (``sequence``) or
geometric mean (``geometric``) of its ratios. The weight is bounded: cut at the upper bound (``truncate``: TIS, Yao et al. 2025), cut at both
(``clip``), or set to 0 outside (``mask``: MIS, IcePop). Bounded and token-level weights are biased for functions of sequences, but reduce
the variance. Rejection and veto set weights to 0 by separate bounds. Rejected tokens still count in the loss's denominator. Log-ratios of
tokens and sequences are clamped to +-20 before exponentiation, and all weights are detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.trainer import Correction, CorrectionInputs, Needs
from miles_tis.bounds import bounds, rejection_bounds
from miles_tis.config import TisConfig

LOG_RATIO_CLAMP = 20.0
VETO_RATIO = 1e-4

Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ratios:
    """The log-ratios of a batch of N samples, at every level; float64.

    Attributes:
        mask: [T] bool trained tokens.
        owner: [T] sample index of each token.
        count: [N] number of trained tokens of each sample.
        token: [T] log rho, clamped; 0 for untrained tokens.
        sequence: [N] sum of log rho, not clamped.
        geometric: [N] mean of log rho, not clamped.
    """

    mask: Tensor
    owner: Tensor
    count: Tensor
    token: Tensor
    sequence: Tensor
    geometric: Tensor

    @classmethod
    def of(cls, inputs: CorrectionInputs) -> Ratios:
        """Compute the ratios between the trainer's old log-probs and the engine's."""
        return cls.between(inputs, inputs.old_log_probs, inputs.rollout_log_probs)

    @classmethod
    def between(cls, inputs: CorrectionInputs, above: Tensor, below: Tensor) -> Ratios:
        """Compute the ratios of two columns of log-probs: ``above - below``."""
        mask = inputs.mask.bool()
        exact = torch.where(mask, above.double() - below.double(), 0.0)
        # with the size given, the host does not wait for the GPU
        samples = torch.arange(len(inputs.lengths), device=mask.device)
        owner = torch.repeat_interleave(samples, inputs.lengths, output_size=len(mask))
        zero = torch.zeros(len(inputs.lengths), dtype=torch.float64, device=mask.device)
        count = zero.index_add(0, owner, mask.double())
        sequence = zero.index_add(0, owner, exact)
        return cls(mask, owner, count, _clamped(exact), sequence, sequence / count.clamp(min=1))

    def at(self, level: str) -> Tensor:
        """Return [T]: the log-ratio of each token, or of its sequence, depending on ``level``."""
        if level == "token":
            return self.token
        chosen = self.sequence if level == "sequence" else self.geometric
        return _clamped(chosen)[self.owner]

    def anywhere(self, tokens: Tensor) -> Tensor:
        """Return [T] bool: whether any trained token of the same sample is set in ``tokens`` [T]."""
        zero = torch.zeros(len(self.count), dtype=torch.float64, device=tokens.device)
        return zero.index_add(0, self.owner, (tokens & self.mask).double())[self.owner] > 0

    def token_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum over trained tokens, number of trained tokens)."""
        return torch.where(self.mask, values.double(), 0.0).sum(), self.mask.sum()

    def sequence_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum, count) of ``values`` [N] over samples with trained tokens."""
        used = self.count > 0
        return torch.where(used, values, 0.0).sum(), used.sum()


def needs(options: TisConfig) -> Needs:
    """Return the needed columns. Weights depend on single samples; only their normalisation needs the whole step."""
    return Needs(old=options.compares, current=options.opsm, whole_step=options.batch_normalize)


def correct(inputs: CorrectionInputs, options: TisConfig) -> Correction:
    """Return the configured correction: importance weights, OPSM, or both."""
    ones = torch.ones_like(inputs.old_log_probs)
    result = Correction(ones, ones.bool())
    if options.compares:
        result = result.times(importance_correction(inputs, options))
    if options.opsm:
        result = result.times(opsm(inputs, options.opsm_delta))
    return result


def importance_correction(inputs: CorrectionInputs, options: TisConfig) -> Correction:
    """Compute importance weights with rejection and veto; weight 1 if only metrics are requested.

    See ``CorrectionInputs`` for shapes.
    """
    low, high = bounds(options)
    ratios = Ratios.of(inputs)
    raw = ratios.at(options.level).exp()
    above, below = raw > high, raw < low
    keep = torch.ones_like(ratios.mask)  # at the level of the weights: tokens or whole sequences
    if options.mode == "mask":
        keep &= ~(above | below)
        weight = raw
    else:
        weight = raw.clamp(min=low, max=high)
    verb = "masked" if options.mode == "mask" else "truncated"
    fractions = {f"{verb}_high": above} | ({f"{verb}_low": below} if low > 0 else {})
    if options.veto:
        fractions["vetoed"] = ratios.anywhere(ratios.token.exp() < VETO_RATIO)
        keep &= ~fractions["vetoed"]
    dropped = torch.zeros_like(keep)
    if options.reject != "none":
        dropped, found = _rejected(ratios, options)
        fractions |= found
    if options.level == "token" or options.reject != "token":
        # a rejected sequence has weight 0 in the mean; single tokens do not change their sequence's weight
        keep, dropped = keep & ~dropped, torch.zeros_like(dropped)
    if options.batch_normalize:
        weight = weight / _mean_weight(weight * keep, ratios, inputs, options)
    keep = keep & ~dropped
    metrics = _metrics(ratios, weight * keep)
    metrics |= {f"tis/fraction_{name}": ratios.token_mean(where) for name, where in fractions.items()}
    if not options.weighs:
        weight, keep = torch.ones_like(weight), torch.ones_like(keep)
    return Correction(weight.to(inputs.old_log_probs.dtype), keep, metrics)


def opsm(inputs: CorrectionInputs, delta: float) -> Correction:
    """Off-policy sequence masking (DeepSeek-V3.2): drop tokens with negative advantage in sequences whose mean log pi_old - log pi is above
    ``delta``. In the first optimizer step of a rollout, the policy is the old one and nothing is dropped."""
    current = inputs.old_log_probs if inputs.log_probs is None else inputs.log_probs
    ratios = Ratios.between(inputs, inputs.old_log_probs, current)
    dropped = (ratios.geometric > delta)[ratios.owner] & (inputs.advantages < 0)
    return Correction(
        torch.ones_like(inputs.old_log_probs), ~dropped, {"tis/fraction_opsm": ratios.token_mean(dropped)}
    )


def _rejected(ratios: Ratios, options: TisConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return [T] bool of rejected tokens, and separate masks for each end that has a bound."""
    low, high = rejection_bounds(options)
    value = ratios.at(options.reject).exp()
    above, below = value > high, value < low
    named = {"rejected_high": above} if high < math.inf else {}
    return above | below, named | ({"rejected_low": below} if low > 0 else {})


def _mean_weight(weight: Tensor, ratios: Ratios, inputs: CorrectionInputs, options: TisConfig) -> Tensor:
    """Return the mean weight of the whole step: over unmasked tokens for token weights, otherwise over sequences."""
    if options.level == "token":
        total, number = ratios.token_mean(weight)
    else:
        first = (inputs.lengths.cumsum(0) - 1).clamp(min=0)  # all tokens of a sequence have its weight
        total, number = ratios.sequence_mean(weight[first] if len(weight) else weight)
    mean = inputs.sum(total) / inputs.sum(number.double()).clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _metrics(ratios: Ratios, weight: Tensor) -> Pairs:
    """Return the metrics that are means over tokens or sequences; ``derived`` computes others from these."""
    ratio = ratios.token.exp()
    squared = (2 * _clamped(ratios.sequence)).exp()
    return {
        "tis/ratio_mean": ratios.token_mean(ratio),
        "tis/weight_mean": ratios.token_mean(weight),
        "tis/weight_square_mean": ratios.token_mean(weight.square()),
        "tis/ppl_ratio": ratios.sequence_mean((-_clamped(ratios.geometric)).exp()),
        "tis/chi2_token": ratios.token_mean(ratio.square() - 1),
        "tis/chi2_sequence": ratios.sequence_mean(squared - 1),
    }


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def derived(metrics: dict[str, float]) -> dict[str, float]:
    """Return the effective sample size as a fraction of the trained tokens, (mean w)^2 / mean w^2, for each policy in ``metrics``."""
    found = {}
    for name, second in metrics.items():
        prefix, key, rest = name.partition("tis/weight_square_mean")
        if key and not rest:
            mean = metrics[f"{prefix}tis/weight_mean"]
            found[f"{prefix}tis/ess"] = mean * mean / second if second > 0 else 0.0
    return found
