"""Taking a weight update into the engine's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.errors import CheckpointError
from miles_embedded.model.sharing import SharingLoader

#: Turns one encoded checkpoint tensor back into numbers.
Decode = Callable[[Encoded], Tensor]


def load_units(model: nn.Module, units: Iterable[Encoded], decode: Decode | None = None) -> int:
    """Copy a complete update into ``model``; see ``Update``. Returns how many bytes were copied."""
    update = Update(model, decode)
    update.take(units)
    return update.finish()


class Update:
    """One update of a model: every tensor of the checkpoint once, in any order.

    Args:
        model: the engine's module; parameters and persistent buffers are overwritten in place.
        decode: how to read units whose ``format`` is not ""; plain ones are taken as they are.
        shared: see ``SharingLoader``.
        share: read plain, lasting tensors where they lie instead of copying them.

    Raises:
        CheckpointError: a name the model does not have, another shape, a format without ``decode``, or tensors that
            never came. What was copied before stays copied: the engine must not generate until an update succeeds.
    """

    def __init__(
        self, model: nn.Module, decode: Decode | None = None, shared: set[str] | None = None, share: bool = False
    ) -> None:
        self._loader = SharingLoader(model, set() if shared is None else shared)
        self._decode, self._share = decode, share

    @torch.no_grad()
    def take(self, units: Iterable[Encoded]) -> None:
        """Some of its tensors, whose memory may be used again afterwards unless they are shared."""
        for unit in units:
            tensor = _plain(unit, self._decode)
            if self._share and unit.lasting:
                self._loader.share(unit.name, tensor)
            elif unit.format:
                self._loader.put(unit.name, tensor)
            else:
                self._loader.put(unit.name, tensor, unit.copy)

    def missing(self) -> list[str]:
        """Names of the model's tensors that did not come so far."""
        return self._loader.missing()

    def finish(self) -> int:
        """All tensors came. Returns how many bytes were copied."""
        missing = self.missing()
        if missing:
            more = "" if len(missing) <= 5 else f" and {len(missing) - 5} more"
            raise CheckpointError(
                f"the weight update is incomplete: {len(missing)} of the model's tensors did not come, "
                f"{', '.join(missing[:5])}{more}; no weight hook may drop tensors the engine needs"
            )
        self._loader.settle()
        return self._loader.copied


def _plain(unit: Encoded, decode: Decode | None) -> Tensor:
    if not unit.format:
        if set(unit.parts) != {unit.name}:
            raise CheckpointError(f"{unit.name} came without a format but with the parts {sorted(unit.parts)}")
        return unit.parts[unit.name]
    if decode is None:
        raise CheckpointError(f"{unit.name} is encoded as {unit.format}, and this engine was given no way to decode it")
    return decode(unit)
