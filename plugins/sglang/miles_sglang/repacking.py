"""Loads new INT4 weights into layers whose weights SGLang packs for its Marlin kernels after it loaded them.

SGLang loads a checkpoint's codes and scales into parameters (the loaded form) and then packs these: ``process_weights_after_loading`` of the
layer replaces them by parameters in another order and shape, which ``load_weights`` cannot fill. ``remember`` therefore keeps how the loaded
form is made, without its memory. During an update the layers have parameters in the loaded form again. A layer gets memory for them when its
first tensor arrives. When its last one has arrived, SGLang's own code packs them, and the result is copied into the memory with which
SGLang computes, because CUDA graphs read it. So an update needs memory for the layers that arrive at the same time, usually one.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: SGLang's classes that pack the weights of a layer.
_SCHEMES = ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE")
#: Name suffixes of the parameters that they pack.
_PACKED = ("weight_packed", "weight_scale")
#: Attribute of a layer of experts; SGLang packs it only once.
_DONE = "is_marlin_converted"
#: Attributes of models in which SGLang caches its parameters by name.
_CACHE = "_cached_params_dict"
#: Attributes that hold a parameter's ``weight_loader``, which is a property of some of SGLang's parameters.
_LOADERS = ("_weight_loader", "weight_loader")


@dataclass(frozen=True)
class Form:
    """How a parameter of the loaded form is made.

    Attributes:
        kind: its class.
        example: a tensor with its shape and dtype, without memory (on ``meta``).
        device: its device.
        attributes: its attributes, such as the function that loads it and its dimensions.
    """

    kind: type[nn.Parameter]
    example: Tensor
    device: torch.device
    attributes: dict[str, Any]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Form:
        """Record the form of a parameter."""
        example = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return cls(type(parameter), example, parameter.device, dict(vars(parameter)))

    def reset(self, parameter: nn.Parameter) -> None:
        """Give a parameter shape and attributes of this form, without memory."""
        parameter.data = self._without_memory()
        vars(parameter).clear()
        vars(parameter).update(self.attributes)

    def make(self) -> nn.Parameter:
        """Return a parameter without memory."""
        made: nn.Parameter = torch.Tensor._make_subclass(self.kind, self._without_memory(), False)
        vars(made).update(self.attributes)
        return made

    def _without_memory(self) -> Tensor:
        data = torch.empty_like(self.example, device=self.device)
        data.untyped_storage().resize_(0)
        return data


class _Count(TorchDispatchMode):
    """Counts the elements that are copied into a parameter."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.elements = 0
        self._memory = parameter.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() == self._memory:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class PackedLayer:
    """A layer whose weights SGLang packs.

    Attributes:
        layer: SGLang's layer.
        forms: names of its packed parameters -> their loaded form.
        computing: names -> the parameters with which SGLang computes, during an update.
        arriving: names -> the parameters of the loaded form, during an update.
        arrived: the parts of these that arrived: name, and arguments of the call that loaded the part.
        filled: number of elements that these calls copied.
    """

    layer: Any
    forms: dict[str, Form]
    computing: dict[str, nn.Parameter] = field(default_factory=dict)
    arriving: dict[str, nn.Parameter] = field(default_factory=dict)
    arrived: set[Hashable] = field(default_factory=set)
    filled: int = 0

    def open(self) -> None:
        """Give the layer parameters in the loaded form."""
        parameters = self.layer._parameters
        self.computing = {name: parameters[name] for name in self.forms}
        self.arriving = {name: form.make() for name, form in self.forms.items()}
        self._attach()

    def close(self) -> None:
        """Give the layer the parameters with which SGLang computes.

        Raises:
            RuntimeError: a part of the layer did not arrive, so it was not packed.
        """
        if self.arrived:
            raise RuntimeError(
                f"an update contained only a part of {', '.join(self.forms)} of a {type(self.layer).__name__}"
            )
        self.layer._parameters.update(self.computing)
        self.computing, self.arriving = {}, {}

    def _attach(self) -> None:
        for name, parameter in self.arriving.items():
            attribute = next(each for each in _LOADERS if each in vars(parameter))
            setattr(parameter, attribute, partial(self._load, name, getattr(parameter, attribute)))
        self.layer._parameters.update(self.arriving)

    def _load(self, name: str, loader: Any, parameter: nn.Parameter, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Load a part of a parameter, as its ``weight_loader``."""
        part = (name, args, tuple(sorted(kwargs.items())))
        if part in self.arrived:  # of a new update; the last one ended part-way
            self._forget()
        self._allocate(True)
        with _Count(parameter) as count:
            loader(parameter, tensor, *args, **kwargs)
        if count.elements:
            self.arrived.add(part)
            self.filled += count.elements
        elif not self.arrived:  # an expert of another rank
            self._allocate(False)
        if self.filled == sum(form.example.numel() for form in self.forms.values()):
            self._pack()

    def _allocate(self, needed: bool) -> None:
        """Give the loaded form its memory, or free it."""
        for each in self.arriving.values():
            size = each.numel() * each.element_size() if needed else 0
            if each.untyped_storage().size() != size:
                each.untyped_storage().resize_(size)

    def _forget(self) -> None:
        self.filled = 0
        self.arrived.clear()

    def _pack(self) -> None:
        """Pack the loaded form into the memory with which SGLang computes."""
        layer, scheme = self.layer, self.layer.scheme
        parameters, attributes, settings = dict(layer._parameters), dict(vars(layer)), dict(vars(scheme))
        setattr(layer, _DONE, False)
        layer.quant_method.process_weights_after_loading(layer)
        for name, target in self.computing.items():
            packed = layer._parameters[name].data
            if packed.shape != target.shape or packed.dtype != target.dtype:
                raise RuntimeError(
                    f"SGLang packed {name} as {packed.dtype} {list(packed.shape)}, and before as {target.dtype} {list(target.shape)}"
                )
            target.data.copy_(packed)
        # SGLang made new buffers, but CUDA graphs read the first ones
        layer._parameters.clear()
        layer._parameters.update(parameters)
        for owner, before in ((layer, attributes), (scheme, settings)):
            vars(owner).clear()
            vars(owner).update(before)
            if isinstance(workspace := before.get("workspace"), Tensor):
                workspace.zero_()  # the kernels' locks; the memory saver does not keep them
        self._forget()
        for name, form in self.forms.items():
            form.reset(self.arriving[name])
        self._attach()


#: model -> its layers whose weights SGLang packs.
_layers: weakref.WeakKeyDictionary[nn.Module, list[PackedLayer]] = weakref.WeakKeyDictionary()


def remember(model: nn.Module) -> None:
    """Record the loaded form of all layers that SGLang will pack. Called before SGLang loads and packs the weights."""
    _layers[model] = [
        PackedLayer(
            module,
            {name: Form.of(p) for name, p in module._parameters.items() if p is not None and name.endswith(_PACKED)},
        )
        for module in model.modules()
        if type(getattr(module, "scheme", None)).__name__ in _SCHEMES
    ]


def packs(model: nn.Module) -> bool:
    """Whether SGLang packs weights of a model."""
    return bool(_layers.get(model))


def open_layers(model: nn.Module) -> None:
    """Prepare all layers for an update, unless they are."""
    for layer in _layers.get(model, ()):
        if not layer.arriving:
            vars(model).pop(_CACHE, None)
            layer.open()


def close_layers(model: nn.Module) -> None:
    """End an update: let the model compute again."""
    for layer in _layers.get(model, ()):
        if layer.arriving:
            vars(model).pop(_CACHE, None)
            layer.close()
