"""Rows that are the input of native products: the kernel that computes them may also write their codes (``Product.row_epilogue``).

The norms of a decoder layer compute the input of query, key and value, and of gate and up or of the experts; attention computes the input of its
output projection, and the gate of an MLP that of ``down_proj``. Layers are found by name. A wrong name for a family costs time but does not
change results, because products identify codes by the rows that they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from miles_embedded.model.row_readers import set_reader
from miles_embedded.quantized.experts import NativeExperts

#: Norms that a block of a decoder layer may read, and the block's first layers. A layer's first norm in this order counts.
_BLOCKS = {
    "self_attn": (("input_layernorm",), ("q_proj", "k_proj", "v_proj")),
    "mlp": (("pre_feedforward_layernorm", "post_attention_layernorm"), ("gate_proj", "up_proj")),
}
#: Layers that read the rows which their own parent computes.
_LAST = ("o_proj", "down_proj")
#: A ``NativeLinear`` or ``NativeExperts``.
Layer = Any
Native = Mapping[nn.Module, Layer]


class RowReader:
    """Decides whether the kernel that computes rows writes the codes for the layers that read them: some linear layers, or experts.

    ``active`` returns whether native products are enabled."""

    def __init__(self, layers: list[Layer], active: Callable[[], bool]) -> None:
        self.layers, self.active = layers, active

    def __call__(self, shape: tuple[int, int], dtype: torch.dtype) -> Any:
        """See ``row_readers.Reader``."""
        first, product = self.layers[0], self.layers[0].product
        ready = all(layer.ready for layer in self.layers)
        if not (self.active() and ready and dtype == product.dtype):
            return None
        joint = not isinstance(first, NativeExperts) and first.joint is not None and first.joint.ready
        return product.row_epilogue(shape, 1 if joint else len(self.layers))


def attach_readers(model: nn.Module, native: Iterable[Layer], active: Callable[[], bool]) -> list[nn.Module]:
    """Set the readers of all modules of ``model`` that compute rows for these layers; returns these modules."""
    found = dict(_find_readers(model, {layer.module: layer for layer in native}))
    for module, layers in found.items():
        set_reader(module, RowReader(layers, active))
    return list(found)


def detach_readers(modules: Iterable[nn.Module]) -> None:
    """Remove the readers of these modules."""
    for module in modules:
        set_reader(module, None)


def _find_readers(model: nn.Module, native: Native) -> Iterator[tuple[nn.Module, list[Layer]]]:
    """Yield each module that computes rows, and the native layers that read them."""
    for module in model.modules():
        for name in _LAST:
            if layers := _native_children(module, (name,), native):
                yield module, layers
        for name, (norms, first) in _BLOCKS.items():
            block = getattr(module, name, None)
            norm = next((found for n in norms if isinstance(found := getattr(module, n, None), nn.Module)), None)
            if norm is not None and isinstance(block, nn.Module):
                layers = _native_children(block, ("experts",), native) or _native_children(block, first, native)
                if layers:
                    yield norm, layers


def _native_children(module: nn.Module, names: Iterable[str], native: Native) -> list[Layer]:
    children = (getattr(module, name, None) for name in names)
    return [native[child] for child in children if isinstance(child, nn.Module) and child in native]
