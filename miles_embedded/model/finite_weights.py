"""Finds weights that are not finite."""

from __future__ import annotations

import torch
from torch import nn

from miles_core.errors import CheckpointError
from miles_embedded.model.storage import codes_of


@torch.no_grad()
def refuse_nonfinite(model: nn.Module) -> None:
    """CheckpointError if a weight contains NaN or infinity, which would silently invalidate the tokens that use it."""
    for name, parameter in model.state_dict(keep_vars=True).items():  # buffers too: a router's correction bias is one
        # the sum avoids a mask; it may overflow for finite values, so check these exactly below
        exact = codes_of(parameter) is not None or not parameter.is_floating_point()
        if exact or parameter.sum(dtype=torch.float32).isfinite():
            continue
        if len(where := (~parameter.isfinite()).nonzero()):
            raise CheckpointError(
                f"{name} holds {len(where)} values that are not finite, the first ({parameter[tuple(where[0])].item()}) at "
                f"{where[0].tolist()}; copy the checkpoint again, or repair it"
            )
