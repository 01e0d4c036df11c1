"""Load weight updates into the engine's model, by copying or by referencing the trainer's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_core.data.weight_unit import Encoded
from miles_core.errors import CheckpointError
from miles_embedded.model.parts import all_modules
from miles_embedded.model.storage import codes_of
from miles_embedded.model.views import Copy, Loader, View


class SharingLoader(Loader):
    """Copies checkpoint tensors into a model, or makes the model's tensors reference them.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        shared: names of module tensors in foreign memory. They are never written to: a tensor with new values gets its own memory again
            and is removed from the set.

    Attributes:
        copied: number of bytes written so far.
        launched: all copies so far; None once something was loaded in another way.
    """

    def __init__(self, model: nn.Module, shared: set[str]) -> None:
        super().__init__(model)
        self._shared = shared
        self._lasting: dict[str, dict[str, tuple[View, Tensor]]] = {}
        self.copied = 0
        self.launched: list[Copies] | None = []

    def defer(self, name: str, tensor: Tensor) -> None:
        """Load a lasting tensor like ``put``, with the next ``load_deferred``."""
        view = self._find_view(name, tensor.shape)
        self._lasting.setdefault(view.source, {})[view.name] = view, tensor

    @torch.no_grad()
    def load_deferred(self, share: bool) -> None:
        """Load the deferred tensors. A module tensor whose parts are all in one allocation with its layout is copied as a whole, or references
        this memory if ``share`` is set and dtype and device are its own; otherwise its parts are copied. Copies of one type are launched
        together, because a launch per tensor would take longer than the copy."""
        waiting: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}

        def wait(target: Tensor, tensor: Tensor) -> None:
            targets, tensors = waiting.setdefault((target.dtype, tensor.dtype, tensor.device), ([], []))
            targets.append(target)
            tensors.append(tensor)

        for source, parts in self._lasting.items():
            home = self._sources[source]
            if codes_of(home) is not None:
                continue
            whole = None if isinstance(home, DTensor) else _find_whole(home, [*parts.values()])
            if whole is None:
                for view, tensor in parts.values():
                    self._write(view, tensor, wait)
            elif whole.data_ptr() == home.data_ptr():
                continue
            elif share and (whole.dtype, whole.device) == (home.dtype, home.device):
                self.launched = None
                home.data = whole
                self._shared.add(source)
            else:
                self._take_memory(source)
                wait(home, whole)
                self.copied += whole.nbytes
        for targets, tensors in waiting.values():
            torch._foreach_copy_(targets, tensors)
            if self.launched is not None:
                self.launched.append((targets, tensors))
        self._lasting = {}

    def find_target(self, name: str) -> Tensor | None:
        """Return the part of the model's memory that a checkpoint tensor is loaded to; None if the model has codes instead."""
        view, home = self.locate(name)
        return None if codes_of(home) is not None else self.slice(view)

    def _write(self, view: View, tensor: Tensor, copy: Copy = Tensor.copy_) -> None:
        home = self._sources[view.source]
        if _is_stored_in(home, view, tensor):
            return
        self._take_memory(view.source)
        if isinstance(home, DTensor):
            self.launched = None
        super()._write(view, tensor, copy)
        self.copied += tensor.nbytes

    def _take_memory(self, source: str) -> None:
        """Give a module tensor its own memory, because foreign memory is not written to. Shards of a tensor are never shared."""
        if source in self._shared:
            home = self._sources[source]
            home.data = home.detach().clone()
            self._shared.remove(source)


def _is_stored_in(home: Tensor, view: View, tensor: Tensor) -> bool:
    """Whether ``view`` of the module tensor ``home`` is the memory of ``tensor``, with the same layout."""
    return (
        tensor.data_ptr() == home.data_ptr() + view.offset * home.element_size()
        and not isinstance(home, DTensor)
        and (tensor.dtype, tensor.device, tensor.stride()) == (home.dtype, home.device, view.stride)
    )


def _find_whole(home: Tensor, parts: Sequence[tuple[View, Tensor]]) -> Tensor | None:
    """Join the parts of a module tensor without copying: return one tensor with the layout of ``home``, or None if the parts are not adjacent
    views of one allocation."""
    view, first = parts[0]
    dtype, size = first.dtype, first.element_size()
    start, offset = first.data_ptr() - view.offset * size, first.storage_offset() - view.offset
    for view, tensor in parts:
        if tensor.data_ptr() != start + view.offset * size or tensor.stride() != view.stride or tensor.dtype != dtype:
            return None
    if len(parts) == 1 and (view.size, view.stride) == (home.shape, home.stride()):
        return first.detach()
    # the addresses are consecutive, so the parts share an allocation if it contains them all
    extent = 1 + sum([(n - 1) * step for n, step in zip(home.shape, home.stride(), strict=True)])
    if offset < 0 or (offset + extent) * size > first.untyped_storage().nbytes():
        return None
    if sum([tensor.numel() for _, tensor in parts]) != home.numel():
        return None
    return first.detach().as_strided(home.shape, home.stride(), offset)


#: Tensors, and what was copied to them.
Copies = tuple[list[Tensor], list[Tensor]]

#: Decodes one encoded checkpoint tensor.
Decode = Callable[[Encoded], Tensor]

#: Decodes encoded checkpoint tensors to other tensors.
DecodeAll = Callable[[Sequence[Encoded], Sequence[Tensor]], None]


def load_units(model: nn.Module, units: Iterable[Encoded], decode: Decode | None = None) -> int:
    """Copy a complete update into ``model``; see ``Update``. Returns the number of copied bytes."""
    update = Update(model, decode)
    update.take(units)
    return update.finish()


class Update:
    """One update of a model: every checkpoint tensor once, in any order.

    Args:
        model: the engine's module; parameters and persistent buffers are overwritten in place.
        decode: decodes units whose ``format`` is not ""; plain units are used unchanged.
        shared: see ``SharingLoader``.
        share: reference plain, lasting tensors in place instead of copying them.

    Attributes:
        units: the units with memory that lasts, so far.

    Raises:
        CheckpointError: an unknown name, another shape, a format without ``decode``, or missing tensors. Tensors copied before the
            error remain: the engine must not generate until an update succeeds.
    """

    def __init__(
        self, model: nn.Module, decode: Decode | None = None, shared: set[str] | None = None, share: bool = False
    ) -> None:
        self._model, self._loader = model, SharingLoader(model, set() if shared is None else shared)
        self._decode, self._share = decode, share
        self.units: list[Encoded] = []

    @torch.no_grad()
    def take(self, units: Iterable[Encoded]) -> None:
        """Load some of the tensors; the caller may reuse their memory afterwards unless they are shared."""
        loader = self._loader
        for unit in units:
            whole = unit.copy is Tensor.copy_
            if unit.lasting and (whole or self._share):
                self.units.append(unit)
            else:
                loader.launched = None
            if unit.format and loader.pass_over(unit.name):
                continue  # the model has the codes, or its own constant ones
            tensor = _plain(unit, self._decode)
            if unit.format:
                loader.put(unit.name, tensor)
            elif unit.lasting and (self._share or whole):
                loader.defer(unit.name, tensor)
            else:
                loader.put(unit.name, tensor, unit.copy)
        if not self._share:
            loader.load_deferred(share=False)

    def missing(self) -> list[str]:
        """Return the names of the model's tensors that have not arrived."""
        return self._loader.missing()

    def finish(self) -> int:
        """Check that all tensors arrived and complete the update. Returns the number of copied bytes."""
        missing = self.missing()
        if missing:
            more = "" if len(missing) <= 5 else f" and {len(missing) - 5} more"
            raise CheckpointError(
                f"the weight update is incomplete: {len(missing)} of the model's tensors are missing, "
                f"{', '.join(missing[:5])}{more}; no weight hook may drop tensors the engine needs"
            )
        self._loader.load_deferred(self._share)
        return self._loader.copied

    def repeat(self, decode_all: DecodeAll | None = None, codes: StoredCodes | None = None) -> RepeatedUpdate | None:
        """Return this finished update for later ones; None if it did more than load tensors that last.

        Args:
            decode_all: decodes lasting units whose ``format`` is not "".
            codes: stores the codes of such units, where the model computes with these.
        """
        loader = self._loader
        encoded = [unit for unit in self.units if unit.format]
        if loader.launched is None or not self.units or (encoded and decode_all is None):
            return None
        found = [(unit, loader.find_target(unit.name)) for unit in encoded]
        decoded = [(unit, target) for unit, target in found if target is not None]
        decode = None
        if decode_all is not None and decoded:
            decode = partial(decode_all, [unit for unit, _ in decoded], [target for _, target in decoded])
        return RepeatedUpdate(self._model, self.units, loader, decode, codes)


class StoredCodes(Protocol):
    """The codes of one update."""

    def is_current(self) -> bool:
        """Whether the model keeps them in the same memory as then."""

    def take(self) -> None:
        """Store the current codes."""


class RepeatedUpdate:
    """The copies of one complete update whose tensors last, to make them again when the same objects arrive. The loop over thousands of tensors
    takes several times as long as the copies on a GPU.

    Args:
        model: the engine's module.
        units: the units of the update.
        loader: what loaded them.
        decode: decodes encoded units to tensors of the model.
        codes: the codes that it stored.

    Attributes:
        encoded: whether a unit has a number format.
        nbytes: number of bytes that the update copied.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Encoded],
        loader: SharingLoader,
        decode: Callable[[], None] | None = None,
        codes: StoredCodes | None = None,
    ) -> None:
        self.units, self.loader, self.nbytes = units, loader, loader.copied
        self._copies = loader.launched or []
        self._decode, self._codes = decode, codes
        self.encoded = any(unit.format for unit in units)
        self._model, self._modules = model, all_modules(model)
        self._homes = [
            (module, name, tensor, tensor.data_ptr())
            for module in self._modules
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    def is_current(self) -> bool:
        """Whether the model's modules and tensors are the same objects in the same memory as then."""
        if all_modules(self._model) != self._modules or (self._codes is not None and not self._codes.is_current()):
            return False
        return all(
            home.data_ptr() == place and (module._parameters.get(name) is home or module._buffers.get(name) is home)
            for module, name, home, place in self._homes
        )

    def find_difference(self, units: Iterator[Encoded]) -> Iterator[Encoded] | None:
        """Return None if ``units`` are those of this update; otherwise an iterator over them."""
        count = 0
        for unit in units:
            if count == len(self.units) or unit is not self.units[count]:
                return chain(self.units[:count], (unit,), units)
            count += 1
        return None if count == len(self.units) else iter(self.units[:count])

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the tensors' current values."""
        for targets, tensors in self._copies:
            torch._foreach_copy_(targets, tensors)
        if self._decode is not None:
            self._decode()
        if self._codes is not None:
            self._codes.take()


def _plain(unit: Encoded, decode: Decode | None) -> Tensor:
    if not unit.format:
        if len(unit.parts) != 1 or unit.name not in unit.parts:
            raise CheckpointError(
                f"{unit.name} has no format but the parts {sorted(unit.parts)}; a plain unit has one part"
            )
        return unit.parts[unit.name]
    if decode is None:
        raise CheckpointError(f"{unit.name} is encoded as {unit.format}, but this engine has no codec to decode it")
    return decode(unit)
