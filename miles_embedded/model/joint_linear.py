"""Linear layers that read one input (query, key and value; gate and up), computed as one product on a GPU without gradient. Their weights
are adjacent in one block of memory, so together they form one matrix, while each remains a separate parameter. The call of the first layer
computes all of them, and the calls of the others return their columns. If the weights have moved (shared by an update, hidden by a format,
sharded) or the input is another tensor, each layer computes its own product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from miles_embedded.model.kept_results import KeptResults
from miles_embedded.model.parts import put_forward
from miles_embedded.model.storage import codes_of

#: Names of layers that read one input, as siblings.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ATTRIBUTE = "miles_joint"


class Joint:
    """Some linear layers of one module, in order, and the results that the first one computed for the others."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self._kept = KeptResults()

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """``layer`` of x [..., in]; may be a part of the columns of a larger matrix."""
        if layer is self.layers[0]:
            self._kept.clear()
            # a pre-forward hook gives each layer another input
            apart = torch.is_grad_enabled() or not x.is_cuda or any(each._forward_pre_hooks for each in self.layers)
            matrix = None if apart else self._matrix()
            if matrix is None:
                return linear(x, layer.weight, layer.bias)
            first, *others = linear(x, matrix).split([each.out_features for each in self.layers], -1)
            self._kept.put(x, dict(zip(self.layers[1:], others, strict=True)))
            return first
        kept = self._kept.take(layer, x)
        return linear(x, layer.weight, layer.bias) if kept is None else kept

    @torch.no_grad()
    def lay_out(self) -> None:
        """Store the weights adjacently in one block of memory."""
        weights = [layer.weight for layer in self.layers]
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part

    def _matrix(self) -> Tensor | None:
        """All weights as one matrix; None where they are not."""
        first = self.layers[0].weight
        if type(first.data) is not Tensor or not first.is_contiguous():
            return None
        end, storage = first.data_ptr() + first.nbytes, first.untyped_storage().data_ptr()
        rows = len(first)
        for layer in self.layers[1:]:
            weight = layer.weight
            near = type(weight.data) is Tensor and weight.is_contiguous() and weight.data_ptr() == end
            if not near or weight.dtype != first.dtype or weight.untyped_storage().data_ptr() != storage:
                return None
            end, rows = end + weight.nbytes, rows + len(weight)
        return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def join_linear(model: nn.Module) -> int:
    """Compute the linear layers of ``model`` that read one input as one product; returns the number of groups."""
    done = 0
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(_plain(layer) for layer in layers) and len({layer.weight.shape[1] for layer in layers}) == 1:  # type: ignore[union-attr]
                _join([layer for layer in layers if layer is not None])
                done += 1
    return done


def joined_layers(model: nn.Module) -> list[list[nn.Linear]]:
    """Return the groups of layers of ``model`` that ``join_linear`` joined."""
    found: dict[int, Joint] = {}
    for module in model.modules():
        joint = module.__dict__.get(_ATTRIBUTE)
        if joint is not None:
            found[id(joint)] = joint
    return [joint.layers for joint in found.values()]


def _plain(layer: Any) -> bool:
    own = type(layer) is nn.Linear and layer.bias is None and "forward" not in layer.__dict__
    return own and layer.weight.is_cuda and codes_of(layer.weight) is None


def _join(layers: list[nn.Linear]) -> None:
    joint = Joint(layers)
    if joint._matrix() is None:  # otherwise the owner of the shared memory has done this
        joint.lay_out()
    for layer in layers:
        layer.__dict__[_ATTRIBUTE] = joint
        put_forward(layer, _forward)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    joint: Joint = layer.__dict__[_ATTRIBUTE]
    return joint(layer, x)
