"""The ratio of two policies at a token, exp(log pi - log pi_old), and estimates of their KL divergence.

Log-ratios are clamped to +-20 before exp, so that a single token cannot make the step infinite; a clamped log-ratio has no gradient.

Estimators of the KL divergence (J. Schulman, "Approximating KL divergence", 2020), with d = log pi - log pi_ref on tokens sampled from pi: k1 =
d is unbiased with high variance; k2 = d^2 / 2 is biased, and its gradient is the unbiased one of the reverse KL; k3 = e^-d - 1 + d is unbiased as
a value and never negative; low_var_kl is k3 with clamps. As a *loss*, k1 has a gradient with mean 0, and the gradient of k3 is not that of the
reverse KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithm.objective import Metrics, PolicyLossInputs
from miles_core.errors import ConfigError

LOG_RATIO_CLAMP = 20.0
LOW_VAR_KL_CLAMP = 10.0
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


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


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL per token, same shape as the inputs and differentiable in both.

    Args:
        log_probs, ref_log_probs: log pi and log pi_ref of the sampled tokens, natural logarithm.
        kind: one of ``KL_TYPES``; low_var_kl clamps d to +-20 and the result to +-10.
    """
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "low_var_kl":
        d = d.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        return (torch.expm1(-d) + d).clamp(-LOW_VAR_KL_CLAMP, LOW_VAR_KL_CLAMP)
    raise ConfigError(f"unknown KL estimator {kind!r}; --kl-loss-type is one of {', '.join(KL_TYPES)}")


def engine_gap(train: Tensor, rollout: Tensor, mask: Tensor, current: Tensor | None = None) -> Metrics:
    """Measure the gap between trainer and engine on the sampled tokens: mean and largest |delta log p|, and k1 and k3 estimates of
    KL(rollout || train), as (sum or maximum, count); and the mean of -log p in the engine, which estimates the entropy of its distribution. All
    arguments are [tokens]. Each term is limited to 20 nats per token, so that a probability of 0 on one side does not make a metric infinite.
    ``current`` is 1 for tokens that the trainer's weights generated: their mean and largest difference and their k3 are metrics of their own."""
    delta = torch.where(mask.bool(), train - rollout, 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).detach()
    found = _mean_and_largest("mismatch/abs_log_prob", delta, mask)
    kl = torch.expm1(delta) - delta
    if current is not None:
        found |= _mean_and_largest("mismatch/current_abs_log_prob", delta, mask * current)
        found["mismatch/current_kl_k3"] = masked_sum(kl, mask * current)
    return found | {
        "mismatch/kl_k1": masked_sum(-delta, mask),
        "mismatch/kl_k3": masked_sum(kl, mask),
        "rollout/entropy": masked_sum(-rollout.clamp(min=-LOG_RATIO_CLAMP), mask),
    }


def _mean_and_largest(name: str, delta: Tensor, mask: Tensor) -> Metrics:
    size = torch.where(mask.bool(), delta.abs(), 0.0)
    return {name: masked_sum(size, mask), f"{name}_max": (torch.cat([size, size.new_zeros(1)]).max(), mask.sum())}
