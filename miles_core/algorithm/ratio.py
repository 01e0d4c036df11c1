"""The ratio of two policies at a token, exp(log pi - log pi_old), and what is reported about it.

Log-ratios are clamped to +-20 before exp, so that a single token cannot make the step infinite; a clamped log-ratio has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithm.objective import Metrics, PolicyLossInputs

LOG_RATIO_CLAMP = 20.0


def log_ratio_of(inputs: PolicyLossInputs) -> Tensor:
    """Compute log pi - log pi_old, with 0 for masked tokens, so that their -inf or NaN affects neither value nor gradient."""
    mask = inputs.mask.bool()
    current = torch.where(mask, inputs.log_probs, 0.0)
    old = torch.where(mask, inputs.old_log_probs.detach(), 0.0)
    return current - old


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp of the clamped log-ratio."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def advantages_of(inputs: PolicyLossInputs, dtype: torch.dtype) -> Tensor:
    """Return the advantages of trained tokens, and 0 elsewhere."""
    return torch.where(inputs.mask.bool(), inputs.advantages.detach(), 0.0).to(dtype)


def ratio_metrics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> Metrics:
    """Return k1 and k3 estimates of KL(pi_old || pi) on tokens sampled from pi_old, and the mean distance of the ratio from 1."""
    with torch.no_grad():
        bounded = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        return {
            "approx_kl": masked_sum(-log_ratio, mask),
            "approx_kl_k3": masked_sum(torch.expm1(bounded) - bounded, mask),
            "ratio": masked_sum(ratio, mask),
            "ratio_deviation": masked_sum((ratio - 1.0).abs(), mask),
        }


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the detached sum over unmasked tokens and their number: a metric's (sum, weight) for a mean over the step's tokens.

    Values of masked tokens are ignored, even NaN. The number is the sum of ``mask``, which must be 0 or 1.
    """
    return torch.where(mask.bool(), values.detach(), 0.0).sum(), mask.sum()


def fraction(condition: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of unmasked tokens for which the condition holds, and the number of unmasked tokens (``mask`` is bool)."""
    return (condition & mask).sum(), mask.sum()
