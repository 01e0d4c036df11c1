"""A backend's quantiser for a number format, and its declared distance from the format.

Engine and trainer may have their own quantisers: a kernel that multiplies by a reciprocal where the format divides, a library that
rounds a scale up. A backend declares for each format how close its results are (``bytes``, ``values``, or within ``bounded(eps)``),
separately for weights and activations; the run verifies the declaration before the first step (``mismatch.parity``). A backend that
calls the format itself declares ``bytes``.
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
    """Distance between two quantisers: the same bytes, the same values (possibly with different codes), or values within ``eps``, the root
    mean square of the differences divided by that of the values."""

    kind: Literal["bytes", "values", "bounded"]
    eps: float = 0.0

    def covers(self, other: Parity) -> bool:
        """Return whether ``other`` is at least as close as this parity."""
        order = ("bytes", "values", "bounded")
        near = self.kind != other.kind or other.eps <= self.eps  # only bounded parities have an eps
        return near and order.index(other.kind) <= order.index(self.kind)

    def __str__(self) -> str:
        return f"bounded({self.eps:.3g})" if self.kind == "bounded" else self.kind


#: Parities of a quantiser that computes what the format defines: the same bytes, or the same values.
BYTES, VALUES = Parity("bytes"), Parity("values")


def bounded(eps: float) -> Parity:
    """Return the parity of values within ``eps``; see ``Parity``."""
    return Parity("bounded", eps)


class Quantizer(ABC):
    """A backend's quantiser for one format, with its declared parity."""

    weights: Parity = BYTES
    activations: Parity = BYTES
    #: the backend's product of codes, which declares its own distance; None if dequantised codes are multiplied
    product: Product | None = None
    #: [N, K] of the weights that ``product`` multiplies in the run's model
    shapes: tuple[tuple[int, int], ...] = ()

    @abstractmethod
    def weight(self, weight: Tensor) -> Parts:
        """Quantise a weight [N, K]; return suffix -> tensor, as ``Format.storage`` declares."""

    @abstractmethod
    def activation(self, x: Tensor) -> Tensor:
        """Quantise and dequantise x [tokens, K] as the backend's products do; return it in x's dtype."""


class FormatItself(Quantizer):
    """Quantiser of a backend that calls the format itself; ``product`` is the format's."""

    def __init__(self, format: Format, product: Product | None = None, shapes: Iterable[tuple[int, int]] = ()) -> None:
        self.format, self.product, self.shapes = format, product, tuple(shapes)

    def weight(self, weight: Tensor) -> Parts:
        return self.format.quantize(weight)

    def activation(self, x: Tensor) -> Tensor:
        return self.format.fake_quantize_activation(x)


#: The kinds of tensors that are measured separately.
TENSORS = ("weights", "activations")


@dataclass(frozen=True)
class Measured:
    """The worst probe of one kind of tensor: its name, parity, and fraction of different values."""

    probe: str
    parity: Parity
    differing: float


@dataclass(frozen=True)
class SideParity:
    """Declared and measured parity of one side of a run, for (weights, activations)."""

    backend: str
    format: str
    probes: tuple[str, ...]
    declared: tuple[Parity, Parity]
    measured: tuple[Measured, Measured]
    #: (declared, measured) distance of native products from the emulated ones; None if products are emulated
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
