"""Constant weights that are stored in a number format only, and decoded each time a module needs them.

A model whose base is frozen needs no BF16 copy of it: the codes and scales of an INT4 base take about a quarter of the memory. A module
with encoded weights decodes them when it starts and drops the values when it ends. The backward pass decodes them again: what autograd
would keep of the decoded values is replaced by a reference to the codes (``saved_tensors_hooks``), except where activation
checkpointing recomputes the layer anyway. The values are those that ``Codec`` gives an engine of the same format, so models that share
the codes compute with equal weights.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.precision.codec import Codec
from miles_embedded.model.call import active_context
from miles_embedded.model.storage import Codes, codes_of, mark_constant, put_codes
from miles_embedded.model.views import View, group_coupled, sources, views
from miles_embedded.quantized.activation import encoded_views
from miles_embedded.quantized.divided import install_divided, store_codes
from miles_embedded.quantized.stored_weights import StoredWeights

log = logging.getLogger(__name__)


@torch.no_grad()
def encode_weights(
    model: nn.Module, codec: Codec, devices: Sequence[torch.device] = (), stored: StoredWeights | None = None
) -> None:
    """Mark the parameters of ``model`` as constant, and store the weights to which the codec's format applies as codes only.

    Args:
        model: prepared by ``miles_embedded.model.load``, or about to be.
        codec: must have a format.
        devices: device of the codes; the parameters' own by default. Joined experts are divided among several (``quantized.divided``).
        stored: the checkpoint, if the parameters have no values yet. They are read and encoded one after the other; codes of this format
            are used as they are.

    Raises:
        ConfigError: a selector matches nothing, or the format cannot store a selected weight.
        MilesError: a weight is NaN or infinite; names the weight.
    """
    assert codec.format is not None
    mark_constant(model.parameters())
    units = list(group_coupled(encoded_views(model, codec)))
    codec.check({view.name: view.size for view in views(model)})
    chosen = {view.source for unit in units for view in unit if codec.quantises(view.name, view.size)}
    tensors = sources(model)
    if stored is not None:
        for source in tensors.keys() - chosen:
            tensors[source].data = stored.values(source)
    left = {source: sum(view.source == source for unit in units for view in unit) for source in chosen}
    found: dict[str, list[tuple[View, Encoded]]] = {source: [] for source in chosen}
    read: dict[str, Tensor] = {}
    for unit in units:
        members = {view.name: view for view in unit if view.source in chosen}
        if not members:
            continue
        encoded_unit = None if stored is None else stored.codes(list(members), codec)
        if encoded_unit is None:
            for source in {view.source for view in unit} - read.keys():
                given = stored is not None and source in chosen
                read[source] = stored.values(source) if given and stored else tensors[source].detach()
            encoded_unit = codec.encode_unit(WeightUnit({view.name: view.of(read[view.source]) for view in unit}))
        for encoded in encoded_unit:
            if encoded.name not in members:
                continue
            view = members[encoded.name]
            found[view.source].append((view, encoded))
            left[view.source] -= 1
            if not left[view.source]:
                read.pop(view.source, None)
                parameter = tensors[view.source]
                assert isinstance(parameter, nn.Parameter)
                store_codes(parameter, found.pop(view.source), codec.format, devices or [parameter.device])
    watch_codes(model)


def read_weights(model: nn.Module, files: Any, codec: Codec, devices: Sequence[torch.device] = ()) -> bool:
    """Fill a model without memory (``load_model``, ``fill``) from ``files``: codes where the codec's format applies, otherwise values.

    ``devices``: as for ``encode_weights``.

    Returns:
        whether the files have every tensor of the model under its own name. If not, the model is not changed.
    """
    stored = StoredWeights(model, files)
    lost = stored.missing()
    if lost is not None:
        log.info("the files have %s under another name, so the whole checkpoint is loaded before it is encoded", lost)
        return False
    encode_weights(model, codec, devices, stored)
    return True


def share_weights(model: nn.Module, owner: nn.Module) -> None:
    """Make the parameters of ``model`` those of ``owner``, in the same memory, and mark them as constant. Both were made from one
    checkpoint, and those of ``owner`` must not change either. ``model`` may be without values; its buffers get those of ``owner``."""
    own = dict(owner.named_parameters())
    for name, parameter in model.named_parameters():
        codes = codes_of(own[name])
        if codes is None:
            parameter.data = own[name].data
        else:
            put_codes(parameter, codes, own[name].device)
    for name, buffer in model.named_buffers():
        buffer.data = owner.get_buffer(name).detach().clone()
    mark_constant(model.parameters())
    watch_codes(model)


def watch_codes(model: nn.Module) -> None:
    """Let the modules of ``model`` decode the weights that are stored as codes."""
    for path, module in model.named_modules():
        if install_divided(path, module):
            continue
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
