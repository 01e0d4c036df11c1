"""Native products of experts: the codes of one module's weights, multiplied by the format's product of all experts.

The backward pass is that of the emulated product, which is computed again there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.precision.format import Format, Parts, part_name
from miles_core.precision.product import Product
from miles_embedded.model.grouped_experts import combine, sort_choices
from miles_embedded.model.views import View
from miles_embedded.quantized.freed import FreedWeight

#: (hidden, index, weights, gate_up, down) -> the emulated product.
Emulated = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_WEIGHTS = ("gate_up_proj", "down_proj")


class NativeExperts:
    """Codes of the standard experts of ``module``.

    Args:
        module: with ``gate_up_proj`` [experts, 2 I, D], the gate above, and ``down_proj`` [experts, D, I].
        views: the module's checkpoint tensors, a matrix or half a matrix of one expert each.
        format: their format.
        product: its native product.
        codes_only: free the values once all codes arrived (``quantized.freed``).

    Attributes:
        codes: weight name -> codes of all experts; empty until a code arrived.
        weights: weight name -> its values.
    """

    def __init__(
        self, module: nn.Module, views: list[View], format: Format, product: Product, codes_only: bool = False
    ) -> None:
        self.module, self.format, self.product, self.codes_only = module, format, product, codes_only
        self.codes: dict[str, Parts] = {}
        self.weights = {
            name: FreedWeight(module, name, partial(self._decode, name), partial(self._tensors, name))
            for name in _WEIGHTS
        }
        self._shapes = {name: tuple(module._parameters[name].shape) for name in _WEIGHTS}  # type: ignore[union-attr]
        self._places = {view.name: self._place(view) for view in views}
        self._rows = {view.name: view.size[0] for view in views}
        self._rooms: dict[str, Parts] = {}
        self._stored: dict[str, Parts] = {}
        self._missing = set(self._places)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors."""
        return tuple(self._places)

    @property
    def ready(self) -> bool:
        """Whether the codes of all experts arrived."""
        return not self._missing

    def _place(self, view: View) -> tuple[str, int, int]:
        """Return weight, expert and first row of a checkpoint tensor."""
        name = view.source.rpartition(".")[2]
        _, rows, k = self._shapes[name]
        row = view.offset // k
        return name, row // rows, row % rows

    def take(self, encoded: Encoded) -> None:
        """Store the codes of one checkpoint tensor; if it is plain, the experts read values again. Codes that the encoder wrote to the memory of
        ``reserve`` are not copied."""
        if encoded.format != self.format.name:
            self.restore()
            self._missing.add(encoded.name)
            return
        for key, room in self.reserve(encoded.name).items():
            if encoded.parts[key] is not room:
                room.copy_(encoded.parts[key])
        if not self._missing:
            return
        self._missing.discard(encoded.name)
        if self.codes_only and self.ready:
            for weight in self.weights.values():
                weight.free()

    def has(self, encoded: Encoded) -> bool:
        """Whether the parts of a checkpoint tensor are the memory of ``reserve``."""
        room = self._rooms.get(encoded.name)
        return room is not None and all(encoded.parts.get(part) is tensor for part, tensor in room.items())

    def reserve(self, name: str) -> Parts:
        """Return the memory for the codes of one checkpoint tensor, stored name -> tensor."""
        if not self.codes:
            self.codes, self._rooms = {weight: self._allocate(weight) for weight in _WEIGHTS}, {}
        if name not in self._rooms:
            weight, expert, row = self._places[name]
            _, n, k = self._shapes[weight]
            size = (self._rows[name], k)
            parts = self._stored[name] = {}
            for stored in self.format.storage(size):
                whole = self.codes[weight][stored.suffix]
                first = row * whole.shape[1] // n
                parts[stored.suffix] = whole[expert, first : first + stored.shape[0]]
            self._rooms[name] = {part_name(name, suffix): tensor for suffix, tensor in parts.items()}
        return self._rooms[name]

    def restore(self) -> None:
        """Store the values again."""
        for weight in self.weights.values():
            weight.restore()

    def _tensors(self, name: str) -> Iterable[Tensor]:
        return self.codes.get(name, {}).values()

    def _decode(self, name: str, values: Tensor) -> bool:
        if name not in self.codes:
            return False
        experts = [{key: part[i] for key, part in self.codes[name].items()} for i in range(len(values))]
        self.format.dequantize_all(experts, list(values.unbind(0)))
        return True

    def stored(self, name: str) -> Parts | None:
        """Return the codes of one checkpoint tensor as the format stores them; None until all codes arrived."""
        if not self.ready:
            return None
        self.reserve(name)
        return self._stored[name]

    def drop(self) -> None:
        """Free the codes."""
        self.codes, self._rooms, self._stored, self._missing = {}, {}, {}, set(self._places)

    def _allocate(self, name: str) -> Parts:
        experts, n, k = self._shapes[name]
        home = self.product.device
        return {
            s.suffix: torch.empty((experts, *s.shape), dtype=s.dtype, device=home) for s in self.format.storage((n, k))
        }

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, emulated: Emulated) -> Tensor:
        """Compute the experts of hidden [rows, D] for choices index and weights [rows, k]; returns [rows, D]."""
        if not torch.is_grad_enabled():
            return self._multiply(hidden, index, weights)
        module: Any = self.module
        y: Tensor = _NativeExperts.apply(hidden, weights, module.gate_up_proj, module.down_proj, index, self, emulated)
        return y

    def _multiply(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        choices = sort_choices(index, self._shapes["down_proj"][0], counted=False)
        x = self.product.experts(hidden, choices.row, choices.ends, *(self.codes[name] for name in _WEIGHTS))
        return combine(x, weights, choices).to(hidden.dtype)


class _NativeExperts(torch.autograd.Function):
    """The native product in the forward pass, the emulated one in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        native: NativeExperts,
        emulated: Emulated,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weights, gate_up, down, index)
        ctx.emulated = emulated
        return native._multiply(hidden, index, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, index = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(inputs)]
        with torch.enable_grad():
            hidden, weights, gate_up, down = (
                x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)
            )
            y = ctx.emulated(hidden, index, weights, gate_up, down)
        wanted = [x for x, need in zip((hidden, weights, gate_up, down), needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grads[0]))
        return *(next(found) if need else None for need in needs), None, None, None


def takes_experts(module: nn.Module, views: list[View], format: Format, product: Product) -> bool:
    """Whether the native product supports these experts.

    Args:
        module: standard experts; the inputs of both products are rounded.
        views: the checkpoint's tensors of their weights. Each must be a contiguous matrix, at a multiple of the format's tiles.
        format, product: the format and its native product.
    """
    shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    if set(shapes) != set(_WEIGHTS) or any(p.dtype != product.dtype for p in module.parameters(recurse=False)):
        return False
    gate_up, down = (shapes[name] for name in _WEIGHTS)
    if not product.takes_experts((gate_up[1], gate_up[2]), (down[1], down[2])):
        return False
    for view in views:
        n, k = shapes[view.source.rpartition(".")[2]][1:]
        row = view.offset // k % n
        whole = view.size[-1] == k and view.stride == (k, 1) and view.offset % k == 0
        if not whole or any(row * s.shape[0] % n for s in format.storage((n, k))):
            return False
    return True
