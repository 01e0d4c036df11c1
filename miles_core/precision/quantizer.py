"""A backend's own code for a number format, and how close to the format it declares to be.

Engine and trainer may quantise with code of their own: a kernel that multiplies by a reciprocal where the format
divides, a library that rounds a scale up. A backend declares for each format how close its results are (``bytes``,
``values``, or within ``bounded(eps)``), for weights and for activations apart; the declaration is measured before the
first step (``mismatch.parity``). A backend that calls the format itself declares ``bytes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product


@dataclass(frozen=True)
class Parity:
    """How close two quantisers are: the same bytes, the same values (other codes may mean them), or values within
    ``eps``, the root mean square of the differences over that of the values."""

    kind: Literal["bytes", "values", "bounded"]
    eps: float = 0.0

    def covers(self, other: Parity) -> bool:
        """Whether ``other`` is at least as close as this."""
        order = ("bytes", "values", "bounded")
        if self.kind == other.kind == "bounded":
            return other.eps <= self.eps
        return order.index(other.kind) <= order.index(self.kind)

    def __str__(self) -> str:
        return f"bounded({self.eps:.3g})" if self.kind == "bounded" else self.kind


BYTES, VALUES = Parity("bytes"), Parity("values")


def bounded(eps: float) -> Parity:
    """Values within ``eps``; see ``Parity``."""
    return Parity("bounded", eps)


class Quantizer(ABC):
    """A backend's own code for one format, and what it declares about it."""

    weights: Parity = BYTES
    activations: Parity = BYTES
    #: the backend's own product of codes, which declares its distance itself; None where dequantised codes are multiplied
    product: Product | None = None
    #: [N, K] of the weights that ``product`` multiplies in the run's model
    shapes: tuple[tuple[int, int], ...] = ()

    @abstractmethod
    def weight(self, weight: Tensor) -> Parts:
        """weight [N, K] as the backend stores it: suffix -> tensor, as ``Format.storage`` declares."""

    @abstractmethod
    def activation(self, x: Tensor) -> Tensor:
        """x [tokens, K] as the backend's products read it, dequantised, in x's dtype."""


class FormatItself(Quantizer):
    """A backend that has no code of its own; ``product`` is the format's."""

    def __init__(self, format: Format, product: Product | None = None, shapes: Iterable[tuple[int, int]] = ()) -> None:
        self.format, self.product, self.shapes = format, product, tuple(shapes)

    def weight(self, weight: Tensor) -> Parts:
        return self.format.quantize(weight)

    def activation(self, x: Tensor) -> Tensor:
        return self.format.fake_quantize_activation(x)


#: The kinds of tensors that are measured apart.
TENSORS = ("weights", "activations")


@dataclass(frozen=True)
class Measured:
    """The worst probe of one kind of tensor: its name, how close it was, and the share of values that differ."""

    probe: str
    parity: Parity
    differing: float


@dataclass(frozen=True)
class SideParity:
    """One side of a run against its format: what it declares and what was measured, for (weights, activations)."""

    backend: str
    format: str
    probes: tuple[str, ...]
    declared: tuple[Parity, Parity]
    measured: tuple[Measured, Measured]
    #: (declared, measured) of products that read codes, against the emulated ones; None where they are emulated
    products: tuple[Parity, Parity] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        tensors: dict[str, dict[str, Any]] = {}
        for what, declared, found in zip(TENSORS, self.declared, self.measured, strict=True):
            tensors[what] = {
                "declared": str(declared),
                "measured": str(found.parity),
                "differing": found.differing,
                "worst_probe": found.probe,
            }
        if self.products is not None:
            tensors["products"] = {"declared": str(self.products[0]), "measured": str(self.products[1])}
        return {"backend": self.backend, "format": self.format, "probes": list(self.probes), **tensors}
