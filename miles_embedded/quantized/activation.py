"""Rounding of the inputs of quantised layers, as the format's matrix products read them.

A low-precision product reads two quantised operands. If a format also quantises activations, the engine's emulation and the trainer's
fake-quantised forward both round them here, with the format's own function, wherever the weight is quantised: the input of a linear
layer; for experts the rows that gate and up read, and those that down reads. The backward pass is straight-through.

The rounding of a token depends on that token only, so batching and packing do not change it. With equal codes, the remaining difference
between two sides is floating-point noise in front of the rounding: a value within that noise of the boundary between two codes may be
rounded either way, which changes it by one code (6 to 12 % of its value in E4M3). In FP32 this is rare, but still the larger part of the
difference between the sides. In BF16 the noise is 1/16 of a code, and the rounding increases its RMS several times. Sides with the same
summation order have no such noise.

If there is a native product (``precision.product``), linear layers with one whole checkpoint tensor pass their input to it unrounded: the
product computes the same codes and multiplies them. The backward pass is that of the emulated product, with the dequantised weight and
the rounded input. Standard experts have a native product, too, where the format has one for them (``quantized.experts``). Linear layers that
join several tensors, and other experts, are emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.errors import ConfigError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Parts
from miles_core.precision.product import Product
from miles_embedded.model.experts import is_standard, round_inputs
from miles_embedded.model.grouped_experts import INPUT_ROUNDING
from miles_embedded.model.parts import configuration
from miles_embedded.model.views import View, matrices, views
from miles_embedded.quantized.emulated import EmulatedLinear
from miles_embedded.quantized.experts import NativeExperts, takes_experts
from miles_embedded.quantized.freed import DecodedCalls
from miles_embedded.quantized.linear import NativeLinear, join_codes
from miles_embedded.quantized.linear_rooms import LinearRooms
from miles_embedded.quantized.rounding import Rounding
from miles_embedded.quantized.row_codes import attach_readers, detach_readers
from miles_embedded.quantized.shared_rounding import SharedRounding, share_roundings
from miles_formats.fused_experts import Family

#: Weight name of an experts module -> [experts] bool, whose inputs are rounded; None for all.
Chosen = dict[str, Tensor | None]


class RoundedInputs(Rounding):
    """Rounds the inputs of a model's quantised matrices while ``enabled``; without effect for weight-only formats.

    Args:
        model: prepared by ``miles_embedded.model.load``, before it is wrapped for checkpointing, compilation or sharding.
        codec: determines the quantised weights and their format.
        product: native product for linear layers, used once ``take`` has received their codes; None emulates it.
        codes_only: free the values of weights whose codes arrived (``quantized.freed``), for an engine.
        rounds_gradients: see ``Rounding``; of linear layers whose class no plugin changed.
        native_experts: use the native product for experts as well.

    Raises:
        ConfigError: matrices that read the same input are only partly quantised, or a module is neither linear nor experts.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        product: Product | None = None,
        codes_only: bool = False,
        rounds_gradients: bool = False,
        native_experts: bool = True,
    ) -> None:
        format = codec.format
        round = nn.Identity() if format is None else format.fake_quantize_activation
        super().__init__(round, codes_only, rounds_gradients)
        self.product = product
        self.layers: dict[str, NativeLinear] = {}
        self.experts: dict[str, NativeExperts] = {}
        self._rooms = LinearRooms(self.layers)
        self._handles: list[Any] = []
        self._computing: list[nn.Module] = []
        self._emulated: dict[nn.Module, SharedRounding | None] = {}
        self._experts: dict[nn.Module, Any] = {}
        self._rounding: list[EmulatedLinear] = []
        if format is None or not format.quantizes_activations:
            return
        self.format = format
        for source, members in _group_by_source(model, codec).items():
            chosen = [codec.quantises(view.name, view.size) for view in members]
            if any(chosen):
                self._attach(model, source, members, chosen)
        self._emulated.update(share_roundings(model, self._emulated))
        if product is not None:
            join_codes(model, self.layers)
            if native_experts:
                self._attach_experts(model, codec, product)
            self._computing = attach_readers(
                model, [*self.layers.values(), *self.experts.values()], self._multiplies_codes
            )

    @property
    def quantizes_gradients(self) -> bool:
        """Whether a layer quantises gradients."""
        return self.rounds_gradients and bool(self.layers or self._rounding)

    def take(self, encoded: Encoded) -> None:
        """Store one tensor of a weight update as the codes of its native layer. Codes in the memory of ``reserve`` are not copied."""
        if encoded.name in self.layers:
            if not self._rooms.has(encoded):
                self.layers[encoded.name].take(encoded)
        elif encoded.name in self.experts:
            self.experts[encoded.name].take(encoded)

    def reserve(self, name: str) -> Parts:
        """Return the memory for the codes of one tensor of a weight update, stored name -> tensor; {} if ``take`` copies them. A linear layer
        has such memory once it has codes, if its product reads them as they are stored."""
        if name in self.experts:
            return self.experts[name].reserve(name)
        return self._rooms.reserve(name) if name in self.layers else {}

    def has(self, encoded: Encoded) -> bool:
        """Whether the codes of this tensor are in the memory of ``reserve``, so that ``take`` does nothing."""
        if encoded.name in self.layers:
            return self._rooms.has(encoded)
        return encoded.name in self.experts and self.experts[encoded.name].has(encoded)

    def find_codes(self, name: str) -> Parts | None:
        """Return the codes of a checkpoint tensor that its native product reads, as the format stores them; None if it reads
        values, or if the product cannot convert its codes back."""
        if name in self.layers:
            return self.layers[name].stored()
        return self.experts[name].stored(name) if name in self.experts else None

    def drop(self, names: Iterable[str]) -> None:
        """Drop the codes of these tensors."""
        for name in names:
            if name in self.layers:
                self._rooms.drop(name)
                self.layers[name].drop()
            elif name in self.experts:
                self.experts[name].drop()

    def drop_all(self) -> None:
        """Drop the codes of all tensors."""
        self.drop([*self.layers, *self.experts])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all codes."""
        for layer in self.layers.values():
            yield from (layer.codes or {}).values()
        for module in dict.fromkeys(self.experts.values()):
            for parts in module.codes.values():
                yield from parts.values()

    def take_each(self, units: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the units of an update unchanged and ``take`` each one."""
        for encoded in units:
            self.take(encoded)
            yield encoded

    @contextmanager
    def emulate(self) -> Iterator[None]:
        """Emulate native layers inside this context."""
        self.native = False
        try:
            yield
        finally:
            self.native = True

    def remove(self) -> None:
        """Restore the model's original forward."""
        detach_readers(self._computing)
        for layer in self.layers.values():
            layer.remove()
        for emulated in self._rounding:
            emulated.remove()
        for experts in dict.fromkeys(self.experts.values()):
            experts.restore()
        self.layers, self.experts = {}, {}
        self._rooms = LinearRooms(self.layers)
        for handle in self._handles:
            handle.remove()
        for module, before in self._experts.items():
            module.__dict__[INPUT_ROUNDING] = before
        self._handles, self._experts, self._computing, self._rounding = [], {}, [], []

    def _attach(self, model: nn.Module, source: str, members: list[View], chosen: list[bool]) -> None:
        path, _, attribute = source.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters[attribute]
        if isinstance(module, nn.Linear):
            _check_uniform(members, chosen)
            view, (rows, columns) = members[0], module.weight.shape
            whole = (view.size, view.stride) == ((rows, columns), module.weight.stride())
            own = type(module).forward is not nn.Linear.forward  # a plugin changed the class of the layer
            # the gradient of a value head has a single column, which no format with blocks of several can store
            rounded = self.rounds_gradients and self.format.refuse((columns, rows)) is None
            native = whole and not own and rounded == self.rounds_gradients
            if self.product is not None and native and self.product.takes((rows, columns)):
                self.layers[view.name] = NativeLinear(self, module, self.format, self.product)
            else:
                self._emulated[module] = None
                self._handles.append(module.register_forward_pre_hook(self._enter))
                if rounded and not own:
                    self._rounding.append(EmulatedLinear(self, module))
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

    def _attach_experts(self, model: nn.Module, codec: Codec, product: Product) -> None:
        """Use the native product of experts whose inputs are all rounded, as far as ``product`` supports them."""
        of_module: dict[str, list[View]] = {}
        for view in encoded_views(model, codec):
            of_module.setdefault(view.source.rpartition(".")[0], []).append(view)
        for path, members in of_module.items():
            module = model.get_submodule(path)
            rounding = self._experts and module.__dict__.get(INPUT_ROUNDING)
            if not isinstance(rounding, _ExpertInputs) or set(rounding.chosen.values()) != {None}:
                continue
            if is_standard(module, product.dtype) and takes_experts(module, members, self.format, product):
                native = rounding.product = NativeExperts(module, members, self.format, product, self.codes_only)
                self.experts |= dict.fromkeys(native.names, native)
                if self.codes_only:
                    self._handles += DecodedCalls(native.weights.values(), partial(self._reads_values, native)).attach(
                        module
                    )

    def _multiplies_codes(self) -> bool:
        """Whether native products are enabled."""
        return self.enabled and self.native

    def _reads_values(self, native: NativeExperts, args: tuple[Any, ...]) -> bool:
        """Whether a call of experts reads values instead of codes."""
        on = self.enabled and self.native and native.ready and not torch.is_grad_enabled()
        return not on or args[0].dtype != native.product.dtype or args[0].numel() == 0

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        shared = self._emulated.get(module)
        return (self(args[0]) if shared is None else shared(module, args[0], self), *args[1:])


class _ExpertInputs:
    """Rounding interface for an experts module (``model.experts``)."""

    def __init__(self, inputs: RoundedInputs) -> None:
        self.inputs = inputs
        self.chosen: Chosen = {}
        self.product: NativeExperts | None = None

    @property
    def enabled(self) -> bool:
        return self.inputs.enabled

    @property
    def native(self) -> NativeExperts | None:
        """The native product if it is enabled and has codes."""
        product = self.product
        return product if product is not None and self.inputs.native and product.ready else None

    def rounds_all(self, name: str) -> bool:
        """Whether the inputs of every expert are rounded for this weight, so that rows can be rounded before they are copied."""
        return name in self.chosen and self.chosen[name] is None

    def __call__(self, name: str, x: Tensor, expert: Callable[[], Tensor]) -> Tensor:
        """Round x [positions, K] for the weight ``name``; ``expert()`` returns the expert of each position."""
        if name not in self.chosen:
            return x
        which = self.chosen[name]
        if which is None:
            return self.inputs(x)
        return torch.where(which.to(x.device)[expert()].unsqueeze(1), self.inputs(x), x)


def encoded_views(model: nn.Module, codec: Codec) -> list[View]:
    """Return the views that ``codec`` encodes: checkpoint tensors, with joined experts split if the codec splits them."""
    codec.settle({view.name: view.size for view in views(model)}, Family.of(configuration(model).to_dict()))
    return matrices(model, codec.experts)


def _group_by_source(model: nn.Module, codec: Codec) -> dict[str, list[View]]:
    found: dict[str, list[View]] = {}
    for view in encoded_views(model, codec):
        found.setdefault(view.source, []).append(view)
    return found


def _experts_of(parameter: Tensor, members: list[View], chosen: list[bool]) -> Tensor | None:
    """Return [experts] bool, whose inputs are rounded; None if all are."""
    experts: dict[int, list[tuple[View, bool]]] = {}
    for view, quantised in zip(members, chosen, strict=True):
        own = range(len(parameter)) if len(view.size) == 3 else [view.offset // parameter.stride(0)]
        for expert in own:
            experts.setdefault(expert, []).append((view, quantised))
    for pairs in experts.values():
        _check_uniform([view for view, _ in pairs], [quantised for _, quantised in pairs])
    which = [experts[expert][0][1] for expert in range(len(parameter))]
    return None if all(which) else torch.tensor(which)


def _check_uniform(members: list[View], chosen: list[bool]) -> None:
    if all(chosen) or not any(chosen):
        return
    quantised, plain = members[chosen.index(True)].name, members[chosen.index(False)].name
    raise ConfigError(
        f"{quantised} is quantised and {plain} is not, but one product reads their common input, which the format quantises too; "
        "exclude both or neither"
    )
