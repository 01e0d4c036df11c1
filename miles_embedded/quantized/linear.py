"""Linear layers that multiply codes natively (``precision.product``), with the backward pass of the emulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.precision.format import Format, Parts
from miles_core.precision.product import Product
from miles_embedded.model.parts import head

if TYPE_CHECKING:
    from miles_embedded.quantized.activation import RoundedInputs


class NativeLinear:
    """Forward of a linear layer that also stores its weight as codes, for a native product.

    It replaces the instance's ``forward``; hooks, parameters and names do not change. It falls back to the emulated layer until codes
    arrive, while the inputs are disabled, and for another dtype.
    """

    def __init__(self, inputs: RoundedInputs, module: nn.Linear, format: Format, product: Product) -> None:
        self.inputs, self.module, self.format, self.product = inputs, module, format, product
        self.codes: Parts | None = None
        self._own = module.forward
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        module = self.module
        on = self.inputs.enabled and self.inputs.native
        if not on or self.codes is None or x.dtype != self.product.dtype or x.numel() == 0:
            return self._own(self.inputs(x))
        if not torch.is_grad_enabled():
            return _forward(x, module.bias, self.codes, self.product)
        y: Tensor = _NativeProduct.apply(x, module.weight, module.bias, self.codes, self.format, self.product)
        return y

    @torch.no_grad()
    def take(self, encoded: Encoded) -> None:
        """Copy the codes of an update, whose tensors may be in a transport buffer. A plain tensor removes the codes."""
        if encoded.format != self.format.name:
            self.codes = None
            return
        home = self.product.device
        parts = self.product.prepare({name.rpartition(".")[2]: t.to(home) for name, t in encoded.parts.items()})
        if self.codes is None:
            self.codes = {
                n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=home) for n, t in parts.items()
            }
        for name, tensor in parts.items():
            self.codes[name].copy_(tensor)

    def remove(self) -> None:
        """Restore the layer's own forward."""
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
