"""Rounds the common input of several emulated linear layers once (query, key and value; gate and up). The call of the first layer rounds
it, and the others reuse the result. This saves their launches and, in training, the copies
that autograd would keep for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from miles_embedded.model.joint_linear import SIBLINGS
from miles_embedded.model.kept_results import KeptResults


class SharedRounding:
    """Rounded input of ``layers``, which are called in this order. A layer with another input, or out of order, rounds its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self._kept = KeptResults()

    def __call__(self, layer: nn.Module, x: Tensor, round: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``round(x)`` for a call of ``layer`` with x [..., K]."""
        if layer is self.layers[0]:
            rounded = round(x)
            self._kept.put(x, dict.fromkeys(self.layers[1:], rounded))
            return rounded
        kept = self._kept.take(layer, x)
        return round(x) if kept is None else kept


def share_roundings(model: nn.Module, rounded: Collection[nn.Module]) -> dict[nn.Module, SharedRounding]:
    """Return layer -> shared rounding for the layers in ``rounded`` that read one input."""
    found: dict[nn.Module, SharedRounding] = {}
    for module in model.modules():
        for names in SIBLINGS:
            layers: list[nn.Module] = [layer for name in names if (layer := getattr(module, name, None)) in rounded]  # type: ignore[misc]
            if len(layers) == len(names):
                found |= dict.fromkeys(layers, SharedRounding(layers))
    return found
