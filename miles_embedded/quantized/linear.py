"""Linear layers that multiply codes natively (``precision.product``), with the backward pass of the emulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product
from miles_embedded.model.parts import head
from miles_embedded.quantized.freed import FreedWeight

if TYPE_CHECKING:
    from miles_embedded.quantized.activation import RoundedInputs
    from miles_embedded.quantized.joint_codes import JointCodes


class NativeLinear:
    """Forward of a linear layer that also stores its weight as codes, for a native product.

    It replaces the instance's ``forward``; hooks, parameters and names do not change. It falls back to the emulated layer until codes
    arrive, while the inputs are disabled, and for another dtype.
    """

    def __init__(self, inputs: RoundedInputs, module: nn.Linear, format: Format, product: Product) -> None:
        self.inputs, self.module, self.format, self.product = inputs, module, format, product
        self.codes: Parts | None = None
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
                return self._own(self.inputs(x))
        if not torch.is_grad_enabled():
            joint = None if self.joint is None else self.joint(self, x)
            if joint is not None:
                return joint
            return _forward(x, module.bias, self.codes, self.product)
        weight = self.weight.values() if self.weight.freed else module.weight
        y: Tensor = _NativeProduct.apply(x, weight, module.bias, self.codes, self.format, self.product)
        return y

    @torch.no_grad()
    def take(self, encoded: Encoded) -> None:
        """Copy the codes of an update, whose tensors may be in a transport buffer. A plain tensor removes the codes."""
        if encoded.format != self.format.name:
            self.weight.restore()
            self.codes = None
            return
        home = self.product.device
        parts = self.product.prepare({name.rpartition(".")[2]: t.to(home) for name, t in encoded.parts.items()})
        if self.codes is None and self.joint is not None:
            self.codes = self.joint.room(self)
        elif self.codes is None:
            self.codes = {
                n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=home) for n, t in parts.items()
            }
        for name, tensor in parts.items():
            self.codes[name].copy_(tensor)
        if self.inputs.codes_only and self._stored() is not None:
            self.weight.free()

    @property
    def ready(self) -> bool:
        """Whether codes arrived."""
        return self.codes is not None

    def _stored(self) -> Parts | None:
        """Return the codes as the format stores them; None if there are none, or the product cannot convert them back."""
        shape = (self.module.out_features, self.module.in_features)
        return None if self.codes is None else self.product.restore(self.codes, shape)

    def decoded_codes(self) -> Tensor | None:
        """Return the weight decoded from the codes, FP32; None if there are none, or the product cannot convert them back."""
        stored = self._stored()
        return None if stored is None else self.format.dequantize(stored)

    def _decode(self, values: Tensor) -> bool:
        decoded = self.decoded_codes()
        if decoded is not None:
            values.copy_(decoded)
        return decoded is not None

    def drop(self) -> None:
        """Free the codes; memory shared with other layers when the last of them frees its codes."""
        self.codes = None
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


def _forward(x: Tensor, bias: Tensor | None, codes: Parts, product: Product) -> Tensor:
    y = product(x.reshape(-1, x.shape[-1]), codes, bias)
    return y.view(*x.shape[:-1], y.shape[1])


class _NativeProduct(torch.autograd.Function):
    """The native product in the forward pass, the emulated one in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, codes: Parts, format: Format, product: Product
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.format = format
        return _forward(x, bias, codes, product)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needs = gradient[0].reshape(-1, len(weight)), ctx.needs_input_grad
        rounded = ctx.format.fake_quantize_activation(x).reshape(-1, x.shape[-1]) if needs[1] else None
        return (
            (grad @ weight).view(x.shape) if needs[0] else None,
            None if rounded is None else grad.t() @ rounded,
            grad.sum(0) if needs[2] else None,
            None,
            None,
            None,
        )


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Return the distinct weight shapes [N, K] of the model's linear layers, without the head."""
    top = head(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not top]
    return list(dict.fromkeys((m.out_features, m.in_features) for m in layers))
