"""Linear layers that multiply codes natively (``precision.product``), with the backward pass of the emulation.

Layers that read one input (query, key and value; gate and up) share a product, if it supports that. Their codes follow each other in one
piece of memory, so together they are the codes of one matrix. The call of the first layer multiplies by all of them, and the calls of the
others return their columns, as ``model.joint_linear`` does with plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product
from miles_embedded.model.joint_linear import SIBLINGS
from miles_embedded.model.kept_results import KeptResults
from miles_embedded.model.parts import head
from miles_embedded.quantized.emulated import multiply
from miles_embedded.quantized.freed import FreedWeight
from miles_embedded.quantized.rounding import Rounding


class NativeLinear:
    """Forward of a linear layer that also stores its weight as codes, for a native product.

    It replaces the instance's ``forward``; hooks, parameters and names do not change. It falls back to the emulated layer until codes
    arrive, while the inputs are disabled, and for another dtype.
    """

    def __init__(self, inputs: Rounding, module: nn.Linear, format: Format, product: Product) -> None:
        self.inputs, self.module, self.format, self.product = inputs, module, format, product
        self.codes: Parts | None = None
        #: The transposed weight, for the gradient of the input, if gradients are quantised and the product supports it.
        self.transposed: Parts | None = None
        self.weight = FreedWeight(module, "weight", self._decode, lambda: (self.codes or {}).values())
        self.joint: JointCodes | None = None
        self._own = module.forward
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        module = self.module
        on = self.inputs.enabled and self.inputs.native
        if not on or self.codes is None or x.dtype != self.product.dtype or x.numel() == 0:
            with self.weight.decoded():
                return self._emulate(self.inputs(x))
        if not torch.is_grad_enabled():
            joint = None if self.joint is None else self.joint(self, x)
            if joint is not None:
                return joint
            return _forward(x, module.bias, self.codes, self.product)
        weight = self.weight.values() if self.weight.freed else module.weight
        if self.joint is not None and self is self.joint.layers[0]:
            self.product.keep_rows(x.reshape(-1, x.shape[-1]), len(self.joint.layers))
        y: Tensor = _NativeProduct.apply(x, weight, module.bias, self)
        return y

    def _emulate(self, x: Tensor) -> Tensor:
        if self.inputs.enabled and self.inputs.rounds_gradients and torch.is_grad_enabled():
            return multiply(x, self.module.weight, self.module.bias, self.inputs.round)
        return self._own(x)

    @torch.no_grad()
    def take(self, encoded: Encoded) -> None:
        """Copy the codes of an update, whose tensors may be in a transport buffer. A plain tensor removes the codes."""
        if encoded.format != self.format.name:
            self.weight.restore()
            self.codes = self.transposed = None
            return
        home = self.product.device
        stored = {name.rpartition(".")[2]: t.to(home) for name, t in encoded.parts.items()}
        parts = self.product.prepare(stored)
        if self.codes is None and self.joint is not None:
            self.codes = self.joint.room(self)
        self.codes = _store(parts, self.codes)
        transposed = self.product.transpose(stored) if self.inputs.rounds_gradients else None
        self.transposed = None if transposed is None else _store(transposed, self.transposed)
        if self.inputs.codes_only and self.stored() is not None:
            self.weight.free()

    @property
    def ready(self) -> bool:
        """Whether codes arrived."""
        return self.codes is not None

    def stored(self) -> Parts | None:
        """Return the codes as the format stores them; None if there are none, or the product cannot convert them back."""
        shape = (self.module.out_features, self.module.in_features)
        return None if self.codes is None else self.product.restore(self.codes, shape)

    def _decode(self, values: Tensor) -> bool:
        stored = self.stored()
        if stored is not None:
            self.format.dequantize_all([stored], [values])
        return stored is not None

    def drop(self) -> None:
        """Free the codes; memory shared with other layers when the last of them frees its codes."""
        self.codes = self.transposed = None
        if self.joint is not None:
            self.joint.drop_unused()

    def example(self) -> Parts:
        """Return tensors with the shapes, strides and dtypes of prepared codes."""
        home = self.product.device
        stored = self.format.storage((self.module.out_features, self.module.in_features))
        return self.product.prepare({s.suffix: torch.empty(s.shape, dtype=s.dtype, device=home) for s in stored})

    def remove(self) -> None:
        """Restore the layer's own forward and its weight."""
        self.weight.restore()
        if self._before is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._before


def _store(parts: Parts, kept: Parts | None) -> Parts:
    """Copy prepared codes to memory that is kept between updates, with their strides; returns it."""
    if kept is None:
        kept = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for n, t in parts.items()}
    for name, tensor in parts.items():
        kept[name].copy_(tensor)
    return kept


def _forward(x: Tensor, bias: Tensor | None, codes: Parts, product: Product) -> Tensor:
    y = product(x.reshape(-1, x.shape[-1]), codes, bias)
    return y.view(*x.shape[:-1], y.shape[1])


class _NativeProduct(torch.autograd.Function):
    """The native product of a layer in the forward pass. Gradients are those of the emulated product; that of the input is a native product of the
    quantised gradient if the layer has its transposed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: NativeLinear) -> Tensor:
        assert layer.codes is not None
        ctx.save_for_backward(x, weight if layer.transposed is None else None)
        ctx.layer, ctx.transposed = layer, layer.transposed
        return _forward(x, bias, layer.codes, layer.product)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needs = gradient[0].reshape(-1, gradient[0].shape[-1]), ctx.needs_input_grad
        inputs, of_input = ctx.layer.inputs, None
        if needs[0] and ctx.transposed is not None:
            of_input = ctx.layer.product(grad, ctx.transposed).view(x.shape)
        elif needs[0]:
            of_input = ((inputs.round(grad) if inputs.rounds_gradients else grad) @ weight).view(x.shape)
        rounded = inputs.round(x).reshape(-1, x.shape[-1]) if needs[1] else None
        return of_input, None if rounded is None else grad.t() @ rounded, grad.sum(0) if needs[2] else None, None


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


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Return the distinct weight shapes [N, K] of the model's linear layers, without the head."""
    top = head(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not top]
    return list(dict.fromkeys((m.out_features, m.in_features) for m in layers))
