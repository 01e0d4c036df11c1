"""Importance weights between the distribution that sampled and the one that trains.

The engine sampled with its own kernels, number format and routing; the trainer's log-probabilities of the same tokens
differ. With rho_t = exp(log p_train_old - log p_rollout) the policy gradient is re-weighted per token, or per sequence by
the product (``sequence``) or geometric mean (``geometric``) of its ratios, and the weight is bounded: cut at the upper end
(``truncate``: TIS, Yao et al. 2025), at both (``clip``), or set to 0 outside (``mask``: MIS, IcePop). Bounded and
token-level weights are biased for sequence functions; what they buy is variance. A rejected token keeps its place in the loss's
denominator. Log-ratios are clamped to +-20 and everything is detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithm.correction import Correction, CorrectionInputs
from miles_core.errors import ConfigError
from miles_tis.config import TisConfig

LOG_RATIO_CLAMP = 20.0
VETO_RATIO = 1e-4


def bounds(options: TisConfig) -> tuple[float, float]:
    """(lower, upper) bound of a weight; ConfigError unless lower <= 1 <= upper."""
    low, high = options.clip_low, options.clip
    if options.threshold is not None:
        threshold = options.threshold
        if threshold <= 0:
            raise ConfigError(f"--tis-threshold {threshold:g} must be greater than 0; 2 bounds weights to [0.5, 2]")
        low, high = min(threshold, 1 / threshold), max(threshold, 1 / threshold)
    if not low <= 1.0 <= high:
        raise ConfigError(
            f"tis bounds [{low:g}, {high:g}] do not contain 1 (--tis-clip-low, --tis-clip): on-policy data would be "
            "re-weighted; give a lower bound <= 1 <= upper bound"
        )
    return low, high


def importance_correction(inputs: CorrectionInputs, options: TisConfig) -> Correction:
    """The correction of one optimiser step; see ``CorrectionInputs`` for shapes."""
    low, high = bounds(options)
    mask = inputs.mask.bool()
    log_ratio = torch.where(mask, inputs.old_log_probs - inputs.rollout_log_probs, 0.0).double()
    log_ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    owner = torch.repeat_interleave(torch.arange(len(inputs.lengths), device=mask.device), inputs.lengths)
    samples = len(inputs.lengths)

    def per_sample(values: Tensor) -> Tensor:
        return torch.zeros(samples, dtype=torch.float64, device=mask.device).index_add(0, owner, values.double())

    count = per_sample(mask)
    product = per_sample(log_ratio)
    if options.level == "token":
        level = log_ratio
    elif options.level == "sequence":
        level = product.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)[owner]
    else:
        level = (product / count.clamp(min=1))[owner]
    raw = level.exp()
    above, below = raw > high, raw < low
    vetoed = per_sample(mask & (log_ratio.exp() < VETO_RATIO))[owner] > 0
    keep = torch.ones_like(mask)
    if options.mode == "mask":
        keep &= ~(above | below)
        weight = raw
    else:
        weight = raw.clamp(min=low if options.mode == "clip" else None, max=high)
    if options.veto:
        keep &= ~vetoed
    if options.batch_normalize:
        weight = weight / _mean_weight(weight * keep, mask, count, inputs, options)
    metrics = _metrics(log_ratio, raw, weight * keep, mask, inputs, (above, below, vetoed), product[count > 0])
    if options.metrics_only and not options.use:
        weight, keep = torch.ones_like(weight), torch.ones_like(keep)
    return Correction(weight.to(inputs.old_log_probs.dtype), keep, metrics)


def _mean_weight(weight: Tensor, mask: Tensor, count: Tensor, inputs: CorrectionInputs, options: TisConfig) -> Tensor:
    """The mean weight of the whole step: over unmasked tokens for token weights, over sequences otherwise."""
    if options.level == "token":
        total, number = (weight * mask).sum(), mask.sum().double()
    else:
        first = inputs.lengths.cumsum(0) - 1  # any token of a sequence carries its weight
        used = count > 0
        total, number = weight[first][used].sum(), used.sum().double()
    mean = inputs.sum(total) / inputs.sum(number).clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _metrics(
    log_ratio: Tensor,
    raw: Tensor,
    weight: Tensor,
    mask: Tensor,
    inputs: CorrectionInputs,
    flags: tuple[Tensor, Tensor, Tensor],
    sequence_log_ratio: Tensor,
) -> dict[str, tuple[Tensor, Tensor]]:
    number = mask.sum()
    ratio = log_ratio.exp()
    one = torch.ones((), dtype=torch.float64)
    above, below, vetoed = flags

    def token_mean(values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(mask, values.double(), 0.0).sum(), number

    first, second = inputs.sum((weight * mask).sum()), inputs.sum((weight.square() * mask).sum())
    ess = first.square() / (second * inputs.sum(number.double())).clamp(min=1e-30)
    squared = (2 * sequence_log_ratio).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return {
        "tis/ratio_mean": token_mean(ratio),
        "tis/weight_mean": token_mean(weight),
        "tis/chi2_token": token_mean(ratio.square() - 1),
        "tis/chi2_sequence": ((squared - 1).sum(), torch.tensor(float(len(squared)))),
        "tis/ess": (ess, one),
        "tis/fraction_high": token_mean(above),
        "tis/fraction_low": token_mean(below),
        "tis/fraction_vetoed": token_mean(vetoed),
    }
