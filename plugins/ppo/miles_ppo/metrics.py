"""Metrics of a critic.

The loss reports moments, which can be averaged over micro-batches and ranks; ``derive`` turns their means into the metrics that users see.
All of them compare the returns with the values from before the rollout's first optimizer step, which the advantages used.
"""

from __future__ import annotations

from torch import Tensor

from miles_core.data import Batch
from miles_ppo.ppo import RETURNS, VALUES

_PREFIX = "ppo/"
#: Moments over the trained tokens: of the returns R, and of the errors R - V.
_MOMENTS = ("returns_mean", "returns_square", "errors_mean", "errors_square")


def moments(batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the moments of a micro-batch as (sum, weight) pairs."""
    mask = batch.mask.double()
    returns = batch.column(RETURNS).double() * mask
    errors = (batch.column(RETURNS) - batch.column(VALUES)).double() * mask
    sums = (returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
    return {_PREFIX + name: (total, mask.sum()) for name, total in zip(_MOMENTS, sums, strict=True)}


def derive(metrics: dict[str, float]) -> None:
    """Replace the moments of every critic, in place, by ``explained_variance`` = 1 - Var(R - V) / Var(R), ``returns_std`` and
    ``value_error`` = sqrt(mean (R - V)^2). Returns that are all equal have no variance to explain, and no ``explained_variance``."""
    last = _PREFIX + _MOMENTS[-1]
    for found in [name.removesuffix(last) for name in metrics if name.endswith(last)]:
        start = found + _PREFIX
        mean, square, error, error_square = (metrics.pop(start + name) for name in _MOMENTS)
        variance = max(square - mean**2, 0.0)
        metrics[start + "returns_std"] = variance**0.5
        metrics[start + "value_error"] = error_square**0.5
        if variance > 1e-9 * max(square, 1e-12):
            metrics[start + "explained_variance"] = 1.0 - max(error_square - error**2, 0.0) / variance
