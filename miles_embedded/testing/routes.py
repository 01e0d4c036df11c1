"""Record the experts chosen for each token, as a plugin would: a minimal example of a recorded field."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.call import active_context
from miles_embedded.model.parts import decoder_layers

#: Name of the field: [tokens - 1, mixture-of-experts layers, experts per token].
ROUTES = "routes"


def record_routes(model: nn.Module) -> None:
    """Hook every layer's experts to write their choices to ``ctx.extras``."""
    experts = [m for layer in decoder_layers(model) for n, m in layer.named_modules() if n.endswith("mlp.experts")]
    for position, module in enumerate(experts):
        module.register_forward_pre_hook(_recorder(position, len(experts)))


def _recorder(position: int, count: int) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        ctx, index = active_context(), args[1]
        if ctx is not None and ctx.kind == "rollout":
            shape = (len(index), count, index.shape[-1])
            rows = ctx.extras.setdefault(ROUTES, torch.zeros(shape, dtype=torch.int32, device=index.device))
            rows[:, position] = index.to(torch.int32)

    return hook
