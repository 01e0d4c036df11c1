"""Constant weights that are stored in a number format only, and decoded each time a module needs them.

A model whose base is frozen needs no BF16 copy of it: the codes and scales of an INT4 base take about a quarter of the memory. A module
with encoded weights decodes them when it starts and drops the values when it ends. The backward pass decodes them again: what autograd
would keep of the decoded values is replaced by a reference to the codes (``saved_tensors_hooks``), except where activation
checkpointing recomputes the layer anyway. The values are those that ``Codec`` gives an engine of the same format, so models that share
the codes compute with equal weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec
from miles_embedded.model.call import active_context
from miles_embedded.model.storage import Codes, codes_of, mark_constant, put_codes
from miles_embedded.model.views import View, group_coupled, views
from miles_embedded.quantized.activation import encoded_views


@dataclass(frozen=True)
class EncodedParameter:
    """The codes of one parameter: its checkpoint tensors (views), each encoded, or plain where the format leaves it alone.

    Attributes:
        parts: views of the parameter and what is stored of them.
        codec: decodes them.
        like: the parameter without storage: shape, strides, dtype and device of the values.
    """

    parts: tuple[tuple[View, Encoded], ...]
    codec: Codec
    like: Tensor

    @torch.no_grad()
    def values(self) -> Tensor:
        """Decode; see ``model.constant.Codes``."""
        like = self.like
        values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        for view, encoded in self.parts:
            view.of(values).copy_(self.codec.decode(encoded))
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Yield codes and scales."""
        for _, encoded in self.parts:
            yield from encoded.parts.values()


@torch.no_grad()
def encode_weights(model: nn.Module, codec: Codec, device: torch.device | None = None) -> None:
    """Mark the parameters of ``model`` as constant, and store the weights to which the codec's format applies as codes only.

    Args:
        model: prepared by ``miles_embedded.model.load``, or about to be.
        codec: must have a format.
        device: device of the codes; the parameters' own by default.

    Raises:
        ConfigError: a selector matches nothing, or the format cannot store a selected weight.
        MilesError: a weight is NaN or infinite; names the weight.
    """
    mark_constant(model.parameters())
    units = list(group_coupled(encoded_views(model, codec)))
    codec.check({view.name: view.size for view in views(model)})
    chosen = {view.source for unit in units for view in unit if codec.quantises(view.name, view.size)}
    parameters = dict(model.named_parameters())
    left = {source: sum(view.source == source for unit in units for view in unit) for source in chosen}
    found: dict[str, list[tuple[View, Encoded]]] = {source: [] for source in chosen}
    for unit in units:
        members = {view.name: view for view in unit if view.source in chosen}
        if not members:
            continue
        plain = {view.name: view.of(parameters[view.source].detach()) for view in unit}
        for encoded in codec.encode_unit(WeightUnit(plain)):
            if (view := members.get(encoded.name)) is None:
                continue
            home = device or parameters[view.source].device
            encoded.parts = {name: tensor.to(home, copy=True) for name, tensor in encoded.parts.items()}
            found[view.source].append((view, encoded))
            left[view.source] -= 1
            if not left[view.source]:
                _store(parameters[view.source], found.pop(view.source), codec, home)
    _watch(model)


def share_weights(model: nn.Module, owner: nn.Module) -> None:
    """Make the parameters of ``model`` those of ``owner``, in the same memory, and mark them as constant. Both were made from one
    checkpoint, and those of ``owner`` must not change either."""
    own = dict(owner.named_parameters())
    for name, parameter in model.named_parameters():
        codes = codes_of(own[name])
        if codes is None:
            parameter.data = own[name].data
        else:
            put_codes(parameter, codes, own[name].device)
    mark_constant(model.parameters())
    _watch(model)


def _store(parameter: nn.Parameter, parts: list[tuple[View, Encoded]], codec: Codec, device: torch.device) -> None:
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    like.untyped_storage().resize_(0)
    put_codes(parameter, EncodedParameter(tuple(parts), codec, like), device)


def _watch(model: nn.Module) -> None:
    for module in model.modules():
        attributes = [n for n, p in module.named_parameters(recurse=False) if codes_of(p) is not None]
        if attributes:
            decoded = _Decoded(tuple(attributes))
            module.register_forward_pre_hook(decoded.enter)
            module.register_forward_hook(decoded.leave, always_call=True)


class _Decoded:
    """Forward hooks of one module: decoded values hide the parameters of the same names while the module runs."""

    def __init__(self, attributes: tuple[str, ...]) -> None:
        self.attributes = attributes
        self._running = threading.local()

    def enter(self, module: nn.Module, args: Any) -> None:
        known = self._running.known = dict[int, tuple[Codes, Tensor]]()
        for attribute in self.attributes:
            codes = codes_of(module._parameters[attribute])
            assert codes is not None
            value = module.__dict__[attribute] = codes.values()
            # the value stays alive while the module runs, though an adapter may hide it: its address identifies it
            known[value.untyped_storage()._cdata] = codes, value
        self._running.saving = self._save_codes(known)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        saving, self._running.saving = getattr(self._running, "saving", None), None
        if saving is not None:
            saving.__exit__(None, None, None)
        getattr(self._running, "known", {}).clear()  # another tensor may get the same address
        for attribute in self.attributes:
            module.__dict__.pop(attribute, None)

    def _save_codes(self, known: dict[int, tuple[Codes, Tensor]]) -> Any:
        """Start to keep codes instead of decoded values for the backward pass; None where nothing is kept."""
        ctx = active_context()
        if not torch.is_grad_enabled() or (ctx is not None and ctx.recompute):
            return None

        def pack(tensor: Tensor) -> Any:
            found = known.get(tensor.untyped_storage()._cdata)
            if found is None:
                return tensor
            return found[0], tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            codes, shape, stride, offset = kept
            values: Tensor = codes.values().as_strided(shape, stride, offset)
            return values

        hooks = saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        return hooks
