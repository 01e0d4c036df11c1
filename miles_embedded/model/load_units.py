"""Taking a weight update into the engine's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from miles_core.data.unit import Encoded
from miles_core.errors import CheckpointError
from miles_embedded.model.views import Loader

#: Turns one encoded checkpoint tensor back into numbers.
Decode = Callable[[Encoded], Tensor]


@torch.no_grad()
def load_units(model: nn.Module, units: Iterable[Encoded], decode: Decode | None = None) -> int:
    """Copy a complete update into ``model``.

    Args:
        model: the engine's module; parameters and persistent buffers are overwritten in place.
        units: every tensor of the checkpoint once, in any order.
        decode: how to read units whose ``format`` is not ""; plain ones are taken as they are.

    Returns:
        How many tensors were copied.

    Raises:
        CheckpointError: a name the model does not have, another shape, a format without ``decode``, or tensors that
            never came. What was copied before stays copied: the engine must not generate until an update succeeds.
    """
    loader, count = Loader(model), 0
    for unit in units:
        loader.put(unit.name, _plain(unit, decode))
        count += 1
    missing = loader.missing()
    if missing:
        more = "" if len(missing) <= 5 else f" and {len(missing) - 5} more"
        raise CheckpointError(
            f"the weight update is incomplete: {len(missing)} of the model's tensors did not come, "
            f"{', '.join(missing[:5])}{more}; no weight hook may drop tensors the engine needs"
        )
    return count


def _plain(unit: Encoded, decode: Decode | None) -> Tensor:
    if not unit.format:
        if set(unit.parts) != {unit.name}:
            raise CheckpointError(f"{unit.name} came without a format but with the parts {sorted(unit.parts)}")
        return unit.parts[unit.name]
    if decode is None:
        raise CheckpointError(f"{unit.name} is encoded as {unit.format}, and this engine was given no way to decode it")
    return decode(unit)
