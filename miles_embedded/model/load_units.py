"""Load weight updates into the engine's model, by copying or by referencing the trainer's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from miles_core.data.weight_unit import Encoded
from miles_core.errors import CheckpointError
from miles_embedded.model.views import Copy, Loader, View


class SharingLoader(Loader):
    """Copies checkpoint tensors into a model, or makes the model's tensors reference them.

    Args:
        model: prepared by ``miles_embedded.model.load``.
        shared: names of module tensors in foreign memory. They are never written to: a tensor with new values gets its own memory again
            and is removed from the set.

    Attributes:
        copied: number of bytes written so far.
    """

    def __init__(self, model: nn.Module, shared: set[str]) -> None:
        super().__init__(model)
        self._shared = shared
        self._lasting: dict[str, list[tuple[View, Tensor]]] = {}
        self._waiting: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
        self.copied = 0

    def share(self, name: str, tensor: Tensor) -> None:
        """Load a tensor like ``put``, deferred to ``reference_shared``, which references it if possible and copies it otherwise."""
        view = self._find_view(name, tuple(tensor.shape))
        if not self._has_codes(view) and not self._holds(view, tensor):
            self._lasting.setdefault(view.source, []).append((view, tensor))

    @torch.no_grad()
    def reference_shared(self) -> None:
        """Complete the update after all tensors arrived. A module tensor references the shared memory if all of its parts are in one
        allocation with the same layout; otherwise its parts are copied."""
        for source, parts in self._lasting.items():
            home = self._sources[source]
            starts = {(t.untyped_storage().data_ptr(), t.storage_offset() - view.offset) for view, t in parts}
            alike = all(t.stride() == v.stride and t.dtype == home.dtype and t.device == home.device for v, t in parts)
            if len(starts) == 1 and alike and sum(t.numel() for _, t in parts) == home.numel():
                ((_, offset),) = starts
                home.data = parts[0][1].detach().as_strided(home.shape, home.stride(), offset)
                self._shared.add(source)
            else:
                for view, tensor in parts:
                    self._write(view, tensor)
        self._lasting = {}

    def _write(self, view: View, tensor: Tensor, copy: Copy = Tensor.copy_) -> None:
        if self._shard(view.source).sharded:  # shards of a tensor are never shared
            super()._write(view, tensor, copy)
            self.copied += tensor.numel() * tensor.element_size()
            return
        if self._holds(view, tensor):
            return
        if view.source in self._shared:  # do not write to foreign memory
            home = self._sources[view.source]
            home.data = home.detach().clone()
            self._shared.remove(view.source)
        copy(self._target(view), tensor)
        self.copied += tensor.numel() * tensor.element_size()

    def wait(self, target: Tensor, tensor: Tensor) -> None:
        """Copy ``tensor`` to ``target``, a part of the model, with the next ``copy_waiting``; for ``put``."""
        kind = target.dtype, tensor.dtype, tensor.device
        targets, tensors = self._waiting.setdefault(kind, ([], []))
        targets.append(target)
        tensors.append(tensor)

    @torch.no_grad()
    def copy_waiting(self) -> None:
        """Make the copies of ``wait``, those of one type with one launch."""
        for targets, tensors in self._waiting.values():
            torch._foreach_copy_(targets, tensors)
        self._waiting = {}

    def _holds(self, view: View, tensor: Tensor) -> bool:
        """Whether the model's tensor has its place in the memory of ``tensor``, which has the shape of ``view``, with the same layout."""
        home = self._sources[view.source]
        own = home.data_ptr() + view.offset * home.element_size(), home.dtype, home.device, view.stride
        return own == (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.stride())


#: Decodes one encoded checkpoint tensor.
Decode = Callable[[Encoded], Tensor]


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

    Raises:
        CheckpointError: an unknown name, another shape, a format without ``decode``, or missing tensors. Tensors copied before the
            error remain: the engine must not generate until an update succeeds.
    """

    def __init__(
        self, model: nn.Module, decode: Decode | None = None, shared: set[str] | None = None, share: bool = False
    ) -> None:
        self._loader = SharingLoader(model, set() if shared is None else shared)
        self._decode, self._share = decode, share

    @torch.no_grad()
    def take(self, units: Iterable[Encoded]) -> None:
        """Load some of the tensors; the caller may reuse their memory afterwards unless they are shared."""
        for unit in units:
            if unit.format and self._loader.pass_over(unit.name):
                continue  # the model has the codes, or its own constant ones
            tensor = _plain(unit, self._decode)
            if self._share and unit.lasting:
                self._loader.share(unit.name, tensor)
            elif unit.format:
                self._loader.put(unit.name, tensor)
            elif unit.lasting and unit.copy is Tensor.copy_:
                self._loader.put(unit.name, tensor, self._loader.wait)
            else:
                self._loader.put(unit.name, tensor, unit.copy)
        self._loader.copy_waiting()

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
        self._loader.reference_shared()
        return self._loader.copied


def _plain(unit: Encoded, decode: Decode | None) -> Tensor:
    if not unit.format:
        if set(unit.parts) != {unit.name}:
            raise CheckpointError(
                f"{unit.name} has no format but the parts {sorted(unit.parts)}; a plain unit has one part"
            )
        return unit.parts[unit.name]
    if decode is None:
        raise CheckpointError(f"{unit.name} is encoded as {unit.format}, but this engine has no codec to decode it")
    return decode(unit)
