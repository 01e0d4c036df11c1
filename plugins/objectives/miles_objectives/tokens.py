"""Shared code of the policy losses: ratios of trained tokens, and metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.trainer import PolicyLossInputs

#: Bound of a log-ratio before ``exp``.
BOUND = 20.0
Metrics = dict[str, tuple[Tensor, Tensor]]


def log_ratios(inputs: PolicyLossInputs) -> Tensor:
    """Return log pi - log pi_old of trained tokens, [tokens], and 0 elsewhere, so that an infinite log-probability of a masked token has
    no effect. A log-ratio beyond +-20 has no gradient."""
    mask = inputs.mask.bool()
    current = torch.where(mask, inputs.log_probs, 0.0)
    old = torch.where(mask, inputs.old_log_probs.detach(), 0.0)
    return (current - old).clamp(-BOUND, BOUND)


def advantages(inputs: PolicyLossInputs) -> Tensor:
    """Return the advantages of trained tokens, [tokens], and 0 elsewhere."""
    return torch.where(inputs.mask.bool(), inputs.advantages.detach(), 0.0).to(inputs.log_probs.dtype)


def metrics_of(log_ratio: Tensor, mask: Tensor, **fractions: Tensor) -> Metrics:
    """Return the metrics of a loss: the KL estimate k3, and the fraction of trained tokens for which each condition holds."""
    with torch.no_grad():
        keep = mask.bool()
        kl = torch.where(keep, torch.expm1(log_ratio) - log_ratio, 0.0)
        found = {name: ((condition & keep).sum(), keep.sum()) for name, condition in fractions.items()}
        return {"approx_kl_k3": (kl.sum(), keep.sum()), **found}
