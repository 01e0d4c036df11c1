"""The products of quantised layers: their inputs, rounded as the format's matrix products read them.

A product in low precision reads two operands. Where a format quantises activations too, the engine's emulation and the
trainer's fake-quantised forward both round them here, with the format's own function, exactly where the weight is
quantised: the input of a linear layer; for experts the rows that gate and up read, and those that down reads. The
backward pass is straight-through.

A token's rounding depends on that token alone, so neither batching nor packing changes it. What remains between two
sides with the same codes is floating-point noise in front of the rounding: a value within that noise of the boundary
between two codes may fall to either side, which moves it by one code (6 to 12 % of its value in E4M3). With the
kernels of one machine this is rare, and it is why unified modes are at the level of kernels and not at zero.

Where there is a native product (``precision.product``), linear layers that hold one whole checkpoint tensor hand their
input to it as it is: it makes the same codes and multiplies them. The backward pass stays that of the emulated product,
with the dequantised weight and the rounded input. Experts, and linear layers that join several tensors, are emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.errors import ConfigError
from miles_core.precision.codec import Codec
from miles_core.precision.fused_experts import Family
from miles_core.precision.product import Product
from miles_embedded.model.configuration import configuration
from miles_embedded.model.experts import round_inputs
from miles_embedded.model.grouped_experts import INPUT_ROUNDING
from miles_embedded.model.views import View, matrices, views
from miles_embedded.quantized.linear import NativeLinear

#: Weight of an experts module -> experts whose input is rounded, [experts] bool; None is all of them.
Chosen = dict[str, Tensor | None]


class RoundedInputs:
    """Rounds the inputs of one model's quantised matrices while ``enabled``; does nothing for a format of weights only.

    Args:
        model: prepared by ``miles_embedded.model.load``, before checkpointing, compilation or sharding wrap it.
        codec: which weights are quantised, and how.
        product: multiplies codes in place of linear layers' own product, once ``take`` has brought their weights; None
            emulates it.

    Raises:
        ConfigError: matrices that read one input are quantised in part, or a module is neither linear nor experts.
    """

    def __init__(self, model: nn.Module, codec: Codec, product: Product | None = None) -> None:
        self.enabled = True
        self.native = True
        self.product = product
        self.layers: dict[str, NativeLinear] = {}
        self._handles: list[Any] = []
        self._experts: dict[nn.Module, Any] = {}
        if codec.format is None or not codec.format.quantizes_activations:
            return
        self.format = codec.format
        self._round = codec.format.fake_quantize_activation
        for source, members in _by_source(model, codec).items():
            chosen = [codec.quantises(view.name, view.size) for view in members]
            if any(chosen):
                self._attach(model, source, members, chosen)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] as the product reads it, with the gradient of x; x itself while this is disabled."""
        if not self.enabled:
            return x
        rounded: Tensor = _StraightThrough.apply(x, self._round)
        return rounded

    def take(self, encoded: Encoded) -> None:
        """One tensor of a weight update: the codes that a native layer multiplies from now on."""
        if encoded.name in self.layers:
            self.layers[encoded.name].take(encoded)

    def drop(self, names: Iterable[str]) -> None:
        """Give up codes that ``take`` brought."""
        for name in names:
            if name in self.layers:
                self.layers[name].codes = None

    def taking(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """The update as it is, each tensor taken when it passes."""
        for encoded in units:
            self.take(encoded)
            yield encoded

    @contextmanager
    def emulated(self) -> Iterator[None]:
        """While this is open, native layers are emulated too."""
        self.native = False
        try:
            yield
        finally:
            self.native = True

    def remove(self) -> None:
        """Leave the model as it was."""
        for layer in self.layers.values():
            layer.remove()
        self.layers = {}
        for handle in self._handles:
            handle.remove()
        for module, before in self._experts.items():
            module.__dict__[INPUT_ROUNDING] = before
        self._handles, self._experts = [], {}

    def _attach(self, model: nn.Module, source: str, members: list[View], chosen: list[bool]) -> None:
        path, _, attribute = source.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters[attribute]
        if isinstance(module, nn.Linear):
            _all_or_none(members, chosen)
            view, (rows, columns) = members[0], module.weight.shape
            whole = (view.size, view.stride) == ((rows, columns), module.weight.stride())
            own = type(module).forward is not nn.Linear.forward  # a plugin gave the layer another class
            if self.product is not None and whole and not own and self.product.takes((rows, columns)):
                self.layers[view.name] = NativeLinear(self, module, self.format, self.product)
            else:
                self._handles.append(module.register_forward_pre_hook(self._enter))
        elif parameter is not None and parameter.ndim == 3:
            if module not in self._experts:
                self._experts[module] = getattr(module, INPUT_ROUNDING, None)
                round_inputs(module, _ExpertInputs(self))
            module.__dict__[INPUT_ROUNDING].chosen[attribute] = _experts_of(parameter, members, chosen)
        else:
            raise ConfigError(
                f"{members[0].name} belongs to a {type(module).__name__}, whose input cannot be rounded: it is neither "
                "a linear layer nor experts; leave it alone with --extra-high-precision-layers-hf"
            )

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self(args[0]), *args[1:])


class _ExpertInputs:
    """What an experts module asks about the rows its products read (``model.experts``)."""

    def __init__(self, inputs: RoundedInputs) -> None:
        self.inputs = inputs
        self.chosen: Chosen = {}

    @property
    def enabled(self) -> bool:
        return self.inputs.enabled

    def all_of(self, name: str) -> bool:
        """Whether every expert's input is rounded for this weight, so that it can be done before rows are copied."""
        return name in self.chosen and self.chosen[name] is None

    def __call__(self, name: str, x: Tensor, expert: Callable[[], Tensor]) -> Tensor:
        """x [places, K]; ``expert`` makes [places], which expert each belongs to."""
        if name not in self.chosen:
            return x
        which = self.chosen[name]
        if which is None:
            return self.inputs(x)
        return torch.where(which.to(x.device)[expert()].unsqueeze(1), self.inputs(x), x)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, round: Callable[[Tensor], Tensor]) -> Tensor:
        return round(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0], None


def encoded_views(model: nn.Module, codec: Codec) -> list[View]:
    """What ``codec`` encodes of a model: its checkpoint tensors, with experts apart where they are taken apart."""
    codec.settle({view.name: view.size for view in views(model)}, Family.of(configuration(model).to_dict()))
    return matrices(model, codec.experts)


def _by_source(model: nn.Module, codec: Codec) -> dict[str, list[View]]:
    found: dict[str, list[View]] = {}
    for view in encoded_views(model, codec):
        found.setdefault(view.source, []).append(view)
    return found


def _experts_of(parameter: Tensor, members: list[View], chosen: list[bool]) -> Tensor | None:
    """[experts] bool: whose input is rounded; None when all are."""
    experts: dict[int, list[tuple[View, bool]]] = {}
    for view, quantised in zip(members, chosen, strict=True):
        own = range(len(parameter)) if len(view.size) == 3 else [view.offset // parameter.stride(0)]
        for expert in own:
            experts.setdefault(expert, []).append((view, quantised))
    for pairs in experts.values():
        _all_or_none([view for view, _ in pairs], [quantised for _, quantised in pairs])
    which = [experts[expert][0][1] for expert in range(len(parameter))]
    return None if all(which) else torch.tensor(which)


def _all_or_none(members: list[View], chosen: list[bool]) -> None:
    if all(chosen) or not any(chosen):
        return
    quantised, plain = members[chosen.index(True)].name, members[chosen.index(False)].name
    raise ConfigError(
        f"{quantised} is quantised and {plain} is left alone, but one product reads their common input, which the "
        "format quantises too; leave both alone or neither"
    )
