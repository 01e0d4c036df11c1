"""Load weight updates into the engine's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.errors import CheckpointError
from miles_embedded.model.sharing import SharingLoader

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
            tensor = _plain(unit, self._decode)
            if self._share and unit.lasting:
                self._loader.share(unit.name, tensor)
            elif unit.format:
                self._loader.put(unit.name, tensor)
            else:
                self._loader.put(unit.name, tensor, unit.copy)

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
