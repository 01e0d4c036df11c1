"""What a trainer's forward imitates of the engine, for one pass without gradient.

The gap between engine and trainer is explained by switching its causes on one at a time (``mismatch.budget``). This is
the trainer's half of it: the same tokens, scored as if the trainer held the engine's weights, computed through the
engine's modules, or kept its keys and values in the cache's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine


@dataclass(frozen=True)
class Emulation:
    """Switches; each is independent of the others.

    Attributes:
        encoded: compute with the weights as a sync would deliver them now: encoded in the rollout's number format and
            decoded again.
        held: an engine in this process; compute with the weights it really holds (and not with ``encoded``).
        snapshot: compute with the weights that ``LearnerHandle.take_snapshot`` put aside (and not with ``encoded``).
        through: the same engine; compute through its modules, so that whatever they do beside holding weights counts.
        emulated_products: with ``through``: emulate the products that the engine computes natively.
        activations: round the inputs of quantised layers as the rollout's number format does.
        kv_dtype: round keys and values to this type; "" leaves them.
    """

    encoded: bool = False
    held: Engine | None = None
    snapshot: bool = False
    through: Engine | None = None
    emulated_products: bool = False
    activations: bool = False
    kv_dtype: str = ""


AS_TRAINED = Emulation()
