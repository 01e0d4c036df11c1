"""Models whose parameters have a shape, a dtype and a device, but no memory yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn


def without_storage(make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make a Transformers model whose parameters have no memory.

    Args:
        make: makes the model in ``dtype``. Its buffers keep their values.
        dtype: that of the parameters, except those that Transformers always keeps in float32.
        device: device of the parameters.
    """
    with _parameters_on_meta():
        model: Any = make()
    wide = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            full = f"{path}.{name}".lstrip(".")
            kind = torch.float32 if any(found.search(full) for found in wide) else tensor.dtype
            if not isinstance(tensor, nn.Parameter):
                module._buffers[name] = tensor.to(device, kind)
            else:
                if id(tensor) not in made:  # else tied
                    made[id(tensor)] = nn.Parameter(_empty(tensor, kind, device), tensor.requires_grad)
                module._parameters[name] = made[id(tensor)]
    made_model: nn.Module = model
    return made_model


def _empty(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    empty = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it; buffers are computed as usual."""
    register = nn.Module.register_parameter

    def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", put):
        yield
