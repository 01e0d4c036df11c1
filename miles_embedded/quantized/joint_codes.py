"""Native products of linear layers that read one input (query, key and value; gate and up): one product of all their codes.

Their codes follow each other in one piece of memory, so together they are the codes of one matrix. The call of the first layer multiplies
by all of them, and the calls of the others return their columns, as ``model.joint_linear`` does with plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from miles_core.precision.format import Parts
from miles_embedded.model.joint_linear import SIBLINGS
from miles_embedded.model.kept_results import KeptResults

if TYPE_CHECKING:
    from miles_embedded.quantized.linear import NativeLinear


class JointCodes:
    """Codes of ``layers`` that read one input, in order; their product supports it (``Product.joins``)."""

    def __init__(self, layers: list[NativeLinear]) -> None:
        self.layers = layers
        self._whole: Parts | None = None
        self._kept = KeptResults()
        self._columns = [layer.module.out_features for layer in layers]
        self._without_bias = all(layer.module.bias is None for layer in layers)
        for layer in layers:
            layer.joint = self

    def room(self, layer: NativeLinear) -> Parts:
        """Return the memory for the prepared codes of one layer, as views of that of all layers."""
        dim, number = layer.product.joint_dim, self.layers.index(layer)
        examples = [each.example() for each in self.layers]
        if self._whole is None:
            self._whole = {}
            for name, first in examples[0].items():
                shape = list(first.shape)
                shape[dim] = sum(example[name].shape[dim] for example in examples)
                # the joined dimension is the outermost one in memory, so strides do not change
                self._whole[name] = torch.empty_strided(shape, first.stride(), dtype=first.dtype, device=first.device)
        found = {}
        for name, whole in self._whole.items():
            sizes = [example[name].shape[dim] for example in examples]
            found[name] = whole.narrow(dim, sum(sizes[:number]), sizes[number])
        return found

    def drop_unused(self) -> None:
        """Free the memory if no layer has codes."""
        if all(layer.codes is None for layer in self.layers):
            self._whole = None

    @property
    def ready(self) -> bool:
        """Whether one product multiplies by all layers."""
        return self._whole is not None and self._without_bias and all(each.codes is not None for each in self.layers)

    def __call__(self, layer: NativeLinear, x: Tensor) -> Tensor | None:
        """Return the product of x [..., K] with ``layer``'s weight, columns of a larger matrix; None if it has to be computed alone."""
        if layer is self.layers[0]:
            self._kept.clear()
            if self._whole is None or not self.ready:
                return None
            first, *others = self._multiply(x, self._whole).split(self._columns, -1)
            self._kept.put(x, dict(zip(self.layers[1:], others, strict=True)))
            return first
        return self._kept.take(layer, x)

    def _multiply(self, x: Tensor, codes: Mapping[str, Tensor]) -> Tensor:
        y = self.layers[0].product(x.reshape(-1, x.shape[-1]), codes)
        return y.view(*x.shape[:-1], y.shape[1])


def join_codes(model: nn.Module, native: Mapping[str, NativeLinear]) -> int:
    """Let native layers of ``model`` that read one input share a product, if it supports that; returns the number of groups."""
    found, of_module = 0, {layer.module: layer for layer in native.values()}
    for module in model.modules():
        for names in SIBLINGS:
            layers = [of_module.get(getattr(module, name, None)) for name in names]  # type: ignore[arg-type]
            group = [layer for layer in layers if layer is not None and not layer.module._forward_pre_hooks]
            if len(group) == len(names) and group[0].product.joins(
                [(each.module.out_features, each.module.in_features) for each in group]
            ):
                JointCodes(group)
                found += 1
    return found
