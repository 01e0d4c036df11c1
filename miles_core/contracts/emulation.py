"""Switches that make a trainer's forward pass imitate the engine, for passes without gradient.

``mismatch.budget`` attributes the difference between engine and trainer log-probabilities to its causes by enabling one cause
at a time. With these switches the trainer scores the same tokens with the engine's weights, through the engine's modules, or
with keys and values in the dtype of the engine's cache. ``mismatch.first_sync`` compares both with a pass in a wider type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine


@dataclass(frozen=True)
class Emulation:
    """Independent switches for one forward pass. The defaults change nothing.

    Attributes:
        encoded: use the weights that a sync would deliver now: encoded in the rollout's number format, then decoded.
        held: an engine in this process; use the weights it currently holds instead of ``encoded`` ones.
        snapshot: use the weights saved by ``LearnerHandle.take_snapshot`` instead of ``encoded`` ones.
        through: an engine in this process; compute through its modules, which includes effects other than their weights.
        emulated_products: with ``through``, emulate the matrix products that the engine computes natively.
        activations: round the inputs of quantised layers as the rollout's number format does.
        kv_dtype: dtype to which keys and values are rounded; "" does not round.
        wider: compute in a wider type than the model's, with the same weights: a 16-bit model in float32, a float32 model in float64.
    """

    encoded: bool = False
    held: Engine | None = None
    snapshot: bool = False
    through: Engine | None = None
    emulated_products: bool = False
    activations: bool = False
    kv_dtype: str = ""
    wider: bool = False


AS_TRAINED = Emulation()
